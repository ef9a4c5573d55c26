"""Workflows 05 to 08 on small random models that lie under the names of the real files.

The models are 128 wide, but as deep as the real ones and in the storage that their names say, so
that the presets' 8-bit storage and blocks in host memory are taken as they are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from api_prompt import api_prompt
from harness import ComfyServer, PromptResult, run_in_comfy
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from flashgrpo_core import embedded
from flashgrpo_core.files import save_tensors
from flashgrpo_core.wan import names
from tests.training._family import FAMILIES, transformer, write_clip_vision

REPO = Path(__file__).resolve().parents[2]
Prompt = dict[str, dict[str, Any]]

#: Workflow that trains -> the one that renders with its LoRA, the family, the depth of its model.
WORKFLOWS = {
    "05_wan21_14b_train": ("05b_wan21_14b_use", "wan2.1-t2v", 40),
    "06_wan22_a14b_train": ("06b_wan22_a14b_use", "wan2.2-t2v-a14b", 40),
    "07_wan22_5b_train": ("07b_wan22_5b_use", "wan2.2-ti2v-5b", 30),
    "08_wan21_i2v_train": ("08b_wan21_i2v_use", "wan2.1-i2v", 40),
}
UMT5 = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
#: Steps of a test; shift 5 gives both experts of 06 several of them.
STEPS = 6
#: Step at which the low-noise expert takes over in those: the first sigma below 0.875.
SWITCH = 3


def workflow(name: str) -> dict[str, Any]:
    """Content of a workflow file."""
    return json.loads((REPO / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def wanted_files(name: str) -> dict[str, str]:
    """File name -> folder, of all that a workflow asks for."""
    return {
        model["name"]: model["directory"]
        for node in workflow(name)["nodes"]
        for model in node["properties"].get("models", [])
    }


def write_small(path: Path, family: str, layers: int, seed: int) -> None:
    """A random transformer in ComfyUI's layout: fp8-scaled or fp16, as its name says."""
    state = transformer(seed, **FAMILIES[family][0], num_layers=layers).state_dict()
    scaled = path.stem.endswith("fp8_scaled")
    tensors = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)} if scaled else {}
    for key, value in state.items():
        name = names.to_original(key) or key
        value = value.contiguous()
        if scaled and value.ndim == 2 and key.startswith("blocks."):
            scale = value.abs().max() / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale_weight"] = scale
        else:
            tensors[name] = value.half()
    save_tensors(path, tensors)


def write_clip_vision_h(path: Path) -> None:
    """CLIP ViT-H with random weights: ComfyUI's loader takes no smaller one than the real."""
    config = CLIPVisionConfig(
        hidden_size=1280,
        intermediate_size=5120,
        num_hidden_layers=32,
        num_attention_heads=16,
        image_size=224,
        patch_size=14,
        projection_dim=1024,
        hidden_act="gelu",
    )
    with torch.device("meta"):
        state = CLIPVisionModelWithProjection(config).state_dict()
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for key, value in state.items():
        if key.endswith("position_ids"):
            continue
        one = "norm" in key and key.endswith("weight")
        noise = torch.randn(value.shape, generator=draw) * 0.02
        inside = key.startswith(("vision_model.", "visual_projection."))
        tensors[key if inside else f"vision_model.{key}"] = (noise + one).half()
    save_tensors(path, tensors)


def place_models(server: ComfyServer, name: str, folder: Path, *, whole: bool) -> None:
    """Put a small file under every name that a workflow asks for.

    Args:
        server: where to.
        name: the workflow that trains.
        folder: for temporary files.
        whole: CLIP vision at its real size (1.3 GB), which the stock loader asks for.
    """
    _, family, layers = WORKFLOWS[name]
    seed = 0
    for file, kind in wanted_files(name).items():
        target = server.models / kind / file
        if kind == "diffusion_models":
            write_small(target, family, layers, seed)
            seed += 1
        elif kind == "clip_vision":
            (write_clip_vision_h if whole else write_clip_vision)(target)
        elif file == "wan2.2_vae.safetensors":
            run_in_comfy(_VAE_22, folder, target=str(target))
        else:
            tiny = embedded.TINY_VAE if kind == "vae" else embedded.TINY_TEXT_ENCODER
            shutil.copyfile(tiny, target)


# ComfyUI takes no narrower one than the real: 160 wide, 1.4 GB in 16 bits.
_VAE_22 = """
import torch
from safetensors.torch import save_file

import comfy.ldm.wan.vae2_2

vae = comfy.ldm.wan.vae2_2.WanVAE(
    dim=160, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
    temperal_downsample=[False, True, True], dropout=0.0,
)
draw = torch.Generator().manual_seed(1)
state = {}
for key, value in vae.state_dict().items():  # their memory is not initialised
    fan_in = value[0].numel() if value.dim() > 1 else 25
    noise = torch.randn(value.shape, generator=draw) * fan_in**-0.5
    state[key] = (noise + ("gamma" in key)).half()
save_file(state, target)
"""


def of_type(prompt: Prompt, kind: str) -> list[dict[str, Any]]:
    """Inputs of all nodes of a type."""
    return [node["inputs"] for node in prompt.values() if node["class_type"] == kind]


def side(name: str) -> int:
    """Pixels: four latent tokens a side at most."""
    return 64 if name.startswith("07") else 32


def training_prompt(server: ComfyServer, name: str, iterations: int = 2) -> Prompt:
    """The training workflow as the frontend queues it, at the size of a test."""
    prompt = api_prompt(workflow(name), server.object_info())
    (video,) = of_type(prompt, "FlashGRPOVideoSettings")
    video |= {"width": side(name), "height": side(name), "frames": 5, "steps": STEPS}
    (advanced,) = of_type(prompt, "FlashGRPOTrainAdvanced")
    advanced |= {"group_size": 2, "warmup": 0, "learning_rate": 1e-2, "ema_decay": 0.0}
    advanced |= {"validation_prompts": 1, "test_prompts": 1}
    (train,) = of_type(prompt, "FlashGRPOTrain")
    train |= {"iterations": iterations, "evaluate_every": 0}
    (compare,) = of_type(prompt, "FlashGRPOCompare")
    compare["prompt_count"] = 1
    return prompt


def rendering_prompt(
    server: ComfyServer, name: str, strength: float = 1.0, *, whole: bool
) -> Prompt:
    """The workflow that renders, at the size of a test.

    The text encoder is ours: ComfyUI's own accepts no smaller one than the real. So it is with CLIP
    vision, which WanImageToVideo can do without: it is left out unless `whole`.
    """
    use = WORKFLOWS[name][0]
    prompt = api_prompt(workflow(use), server.object_info())
    for key, node in list(prompt.items()):
        inputs = node["inputs"]
        if node["class_type"] == "CLIPLoader":
            del prompt[key]
        elif node["class_type"].startswith("CLIPVision") and not whole:
            del prompt[key]
        elif node["class_type"] == "WanImageToVideo" and not whole:
            del inputs["clip_vision_output"]
            inputs |= {"width": side(name), "height": side(name), "length": 5}
        elif node["class_type"] == "CLIPTextEncode":
            inputs = {"text": inputs["text"], "text_encoder": UMT5}
            prompt[key] = {"class_type": "FlashGRPOEncodePrompt", "inputs": inputs}
        elif "length" in inputs:
            inputs |= {"width": side(name), "height": side(name), "length": 5}
        elif node["class_type"] == "LoraLoaderModelOnly":
            inputs["strength_model"] = strength
        elif "steps" in inputs:
            inputs["steps"] = STEPS
    if name.startswith("06"):
        high, low = of_type(prompt, "KSamplerAdvanced")
        high["end_at_step"] = low["start_at_step"] = SWITCH
    return prompt


def video_of(server: ComfyServer, result: PromptResult) -> np.ndarray:
    """Frames of the only saved video, uint8 `[T, H, W, 3]`."""
    (saved,) = [x for out in result.outputs.values() for x in out.get("images", [])]
    path = server.output / saved["subfolder"] / saved["filename"]
    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def train_and_render(
    server: ComfyServer, name: str, iterations: int = 2, *, whole: bool
) -> dict[str, Any]:
    """Both workflows of a pair, the second with and without the LoRA.

    Returns:
        `loras`: the saved names; `not_loaded`: lines of the log about keys that found no module;
        `frames`: shape of the video; `difference`: mean absolute difference that the LoRA makes,
        in grey levels of 255.
    """
    server.queue(training_prompt(server, name, iterations), timeout=900)
    on = rendering_prompt(server, name, whole=whole)
    loras = [inputs["lora_name"] for inputs in of_type(on, "LoraLoaderModelOnly")]
    start = len(server.log())
    with_lora = video_of(server, server.queue(on, timeout=600))
    log = server.log()[start:]
    off = rendering_prompt(server, name, 0.0, whole=whole)
    without = video_of(server, server.queue(off, timeout=600))
    return {
        "loras": loras,
        "not_loaded": [line for line in log.splitlines() if "not loaded" in line.lower()],
        "frames": list(with_lora.shape),
        "difference": round(float(np.abs(with_lora.astype(float) - without).mean()), 2),
    }
