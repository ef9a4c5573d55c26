"""Korean and Chinese texts of two experts, start images and CLIP vision."""

from __future__ import annotations

TEXTS: dict[str, tuple[str, str]] = {
    "train experts": ("학습할 전문가", "训练的专家"),
    "boundary": ("경계", "边界"),
    "continue from low": ("저노이즈 이어서 시작", "低噪声起始 LoRA"),
    "CLIP vision": ("CLIP 비전", "CLIP 视觉"),
    "expert": ("전문가", "专家"),
    "guidance low": ("저노이즈 가이던스", "低噪声引导"),
    "start image": ("시작 이미지", "起始图像"),
    "LoRA name low noise": ("저노이즈 LoRA 이름", "低噪声 LoRA 名称"),
    "With two experts, which of them get a LoRA; both always sample.": (
        "전문가가 둘일 때 LoRA를 얻는 쪽입니다. 샘플링은 항상 둘 다 합니다.",
        "有两个专家时，哪个获得 LoRA；采样始终使用两者。",
    ),
    "Sigma at which the low-noise expert takes over; 0 = 0.875 for text-to-video, 0.9 for image-to-video.": (
        "저노이즈 전문가가 이어받는 시그마입니다. 0 = 텍스트-비디오는 0.875, 이미지-비디오는 0.9.",
        "低噪声专家接手时的 sigma；0 = 文生视频为 0.875，图生视频为 0.9。",
    ),
    "Like continue_from, for the low-noise expert of Wan 2.2 14B.": (
        "continue_from과 같으며 Wan 2.2 14B의 저노이즈 전문가용입니다.",
        "与 continue_from 相同，用于 Wan 2.2 14B 的低噪声专家。",
    ),
    "CLIP vision model (clip_vision_h.safetensors from models/clip_vision); Wan 2.1 image-to-video needs it, no other Wan does.": (
        "CLIP 비전 모델(models/clip_vision의 clip_vision_h.safetensors)입니다. Wan 2.1 이미지-비디오만 필요합니다.",
        "CLIP 视觉模型（models/clip_vision 中的 clip_vision_h.safetensors）；只有 Wan 2.1 图生视频需要。",
    ),
    "With two experts (Wan 2.2 14B), which one it goes on; both for every other model.": (
        "전문가가 둘일 때(Wan 2.2 14B) 어느 쪽에 적용할지 정합니다. 다른 모델은 both입니다.",
        "有两个专家时（Wan 2.2 14B）作用于哪一个；其他模型选 both。",
    ),
    "Guidance of the low-noise expert of Wan 2.2 A14B; 0 = the same as guidance.": (
        "Wan 2.2 A14B 저노이즈 전문가의 가이던스입니다. 0 = guidance와 같음.",
        "Wan 2.2 A14B 低噪声专家的引导；0 = 与 guidance 相同。",
    ),
    "First frame of the videos, for image-to-video models: one image for all prompts, or a batch with one for each prompt in order. Prompts that name an image in their .jsonl file keep it.": (
        "이미지-비디오 모델에서 비디오의 첫 프레임입니다. 모든 프롬프트에 이미지 하나, 또는 프롬프트 순서대로 하나씩 담긴 배치입니다. .jsonl 파일에 이미지가 있는 프롬프트는 그것을 씁니다.",
        "图生视频模型的视频首帧：所有提示词共用一张图像，或按提示词顺序每个一张的批次。在 .jsonl 文件中指定了图像的提示词保留自己的图像。",
    ),
    "Wan VAE (.safetensors from models/vae): wan_2.1_vae for Wan 2.1 and 2.2 14B, wan2.2_vae for 2.2 5B, or the embedded tiny VAE of the tiny Wan.": (
        "Wan VAE(models/vae의 .safetensors): Wan 2.1과 2.2 14B는 wan_2.1_vae, 2.2 5B는 wan2.2_vae, 또는 작은 Wan의 내장 VAE.",
        "Wan VAE（models/vae 中的 .safetensors）：Wan 2.1 与 2.2 14B 用 wan_2.1_vae，2.2 5B 用 wan2.2_vae，或微型 Wan 的内置 VAE。",
    ),
}
