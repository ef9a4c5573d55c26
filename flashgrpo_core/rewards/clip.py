"""CLIP for rewards: loaded from the layouts in which its weights go around, and its preprocessing.

The preprocessing is done here with PIL and torch, so that torchvision is not needed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ..errors import FlashGRPOError
from .checkpoint import Tensors, build, load_weights, read_json, read_tensors
from .model_reward import once

#: Mean and standard deviation of CLIP's pixels, RGB in 0..1.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
#: Longest prompt in tokens, start and end included.
TOKENS = 77

# Vision width -> heads and activation of the published models. A weights file alone does not say:
# width 768 and 1024 are OpenAI's B and L, 1280 and 1664 are LAION's H and bigG.
_KNOWN = {768: (12, "quick_gelu"), 1024: (16, "quick_gelu"), 1280: (16, "gelu"), 1664: (16, "gelu")}


@dataclass
class Clip:
    """A loaded CLIP.

    Attributes:
        network: `CLIPModel`, or `CLIPVisionModelWithProjection` without the text side.
        size: side of its input, pixels.
        tokenizer: tokenizer of the text side, or None.
    """

    network: Any
    size: int
    tokenizer: Any = None
    _texts: dict[str, torch.Tensor] = field(default_factory=dict)

    def image_vectors(self, pixels: torch.Tensor) -> torch.Tensor:
        """Unit vectors fp32 `[n, d]` of preprocessed frames `[n, 3, size, size]`."""
        weight = self.network.visual_projection.weight
        pixels = pixels.to(weight.device, weight.dtype)
        if self.tokenizer is None:
            found = self.network(pixel_values=pixels).image_embeds
        else:
            found = _vector(self.network.get_image_features(pixel_values=pixels))
        return F.normalize(found.float(), dim=-1)

    def text_vector(self, prompt: str) -> torch.Tensor:
        """Unit vector fp32 `[d]` of a prompt, cut off after 77 tokens; computed once."""

        def encode() -> torch.Tensor:
            ids = self.tokenizer([prompt], truncation=True, max_length=TOKENS)["input_ids"]
            ids = torch.tensor(ids, device=self.network.text_projection.weight.device)
            found = _vector(self.network.get_text_features(input_ids=ids))
            return F.normalize(found.float(), dim=-1)[0].cpu()

        return once(self._texts, prompt, encode)


def _vector(output: Any) -> torch.Tensor:
    # transformers 5 wraps what earlier versions return as a tensor.
    return output if torch.is_tensor(output) else output.pooler_output


# --- preprocessing ------------------------------------------------------------------------------


def crop_frames(frames: np.ndarray, size: int) -> torch.Tensor:
    """CLIP's own preprocessing: short side to `size` (bicubic), centre crop, normalise.

    Args:
        frames: uint8 `[n, H, W, 3]`.
        size: side of the result.

    Returns:
        fp32 `[n, 3, size, size]`.
    """
    height, width = frames.shape[1:3]
    short = min(height, width)
    new_height, new_width = (int(size * side / short) for side in (height, width))
    top, left = (new_height - size) // 2, (new_width - size) // 2
    resized = resize_pil(frames, new_height, new_width)
    return normalise(to_planes(resized[:, top : top + size, left : left + size]))


def pad_frames(frames: np.ndarray, size: int) -> torch.Tensor:
    """HPSv2's preprocessing: long side to `size`, black borders, normalise.

    The resampling is torch's antialiased bicubic on floats, as torchvision does it for tensors.

    Args:
        frames: uint8 `[n, H, W, 3]`.
        size: side of the result.

    Returns:
        fp32 `[n, 3, size, size]`.
    """
    planes = to_planes(frames)
    height, width = planes.shape[2:]
    scale = size / max(height, width)
    if scale != 1:
        target = (max(1, round(height * scale)), max(1, round(width * scale)))
        planes = F.interpolate(planes, target, mode="bicubic", antialias=True, align_corners=False)
    below, right = size - planes.shape[2], size - planes.shape[3]
    borders = (right // 2, right - right // 2, below // 2, below - below // 2)
    return normalise(F.pad(planes, borders))


def resize_pil(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Frames uint8 `[n, H, W, 3]` resized by PIL's bicubic filter."""
    if frames.shape[1:3] == (height, width):
        return frames
    size = (width, height)
    return np.stack(
        [np.asarray(Image.fromarray(f).resize(size, Image.Resampling.BICUBIC)) for f in frames]
    )


def to_planes(frames: np.ndarray) -> torch.Tensor:
    """Frames uint8 `[n, H, W, 3]` as fp32 `[n, 3, H, W]` in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255


def normalise(planes: torch.Tensor) -> torch.Tensor:
    """Subtract CLIP's mean and divide by its standard deviation, `[n, 3, H, W]`."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    return (planes - mean) / std


# --- loading ------------------------------------------------------------------------------------


def load_clip(
    path: Path, dtype: torch.dtype, *, text: bool = True, tokenizer: Path | None = None
) -> Clip:
    """Load CLIP on the CPU.

    Args:
        path: a Hugging Face folder, a folder with one weights file, or a weights file; the names
            in it may be those of transformers or of OpenCLIP.
        dtype: dtype of the weights.
        text: also load the text side.
        tokenizer: folder of the tokenizer; None is the folder of the model.

    Raises:
        FlashGRPOError: something is missing or does not fit.
    """
    from transformers import CLIPConfig, CLIPModel, CLIPVisionModelWithProjection

    tensors = _as_transformers(read_tensors(path), path)
    names = [n for n in tensors if not n.endswith(".position_ids")]
    vision_only = not any(n.startswith("text_model.") for n in names)
    if text and vision_only:
        raise FlashGRPOError(
            f"{path}: holds only the vision side of CLIP, which cannot read prompts: use the "
            "complete model"
        )
    words = load_tokenizer(tokenizer or path) if text else None
    described = path / "config.json"
    if described.is_file():
        settings = read_json(described)
        if settings.get("model_type") == "clip_vision_model":
            settings = {"vision_config": settings, "projection_dim": settings["projection_dim"]}
    else:
        settings = _settings(tensors, path, None if words is None else words.eos_token_id)
    config = CLIPConfig.from_dict(settings)
    config._attn_implementation = "sdpa"
    if text:
        network = build(lambda: CLIPModel(config))
    else:
        vision = config.vision_config
        vision.projection_dim = config.projection_dim
        network = build(lambda: CLIPVisionModelWithProjection(vision))
        sides = ("vision_model.", "visual_projection.")
        names = [n for n in names if n.startswith(sides)]
    load_weights(network, tensors, {n: n for n in names}, dtype, path, fp32=("logit_scale",))
    return Clip(network, int(config.vision_config.image_size), words)


def load_tokenizer(folder: Path) -> Any:
    """CLIP's tokenizer from a folder.

    Raises:
        FlashGRPOError: its files are missing.
    """
    from transformers import CLIPTokenizer

    folder = folder if folder.is_dir() else folder.parent
    if not all((folder / n).is_file() for n in ("vocab.json", "merges.txt")):
        raise FlashGRPOError(
            f"{folder}: no vocab.json and merges.txt, the tokenizer of CLIP: put them beside the "
            "weights, or name their folder with the option tokenizer"
        )
    return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


def _settings(tensors: Tensors, path: Path, end_token: int | None) -> dict[str, Any]:
    """The configuration, from the shapes of the tensors."""
    try:
        patches = tensors["vision_model.embeddings.patch_embedding.weight"].shape  # [w, 3, p, p]
        positions = tensors["vision_model.embeddings.position_embedding.weight"].shape[0]
        inner = tensors["vision_model.encoder.layers.0.mlp.fc1.weight"].shape[0]
        projection = tensors["visual_projection.weight"].shape[0]
    except (FlashGRPOError, KeyError):
        raise FlashGRPOError(
            f"{path}: no CLIP weights with a projection: choose the file of a CLIP model"
        ) from None
    width, patch = int(patches[0]), int(patches[2])
    if width not in _KNOWN:
        raise FlashGRPOError(
            f"{path}: a CLIP of width {width} is not known by its weights alone: put it into a "
            "folder with its config.json and choose the folder"
        )
    heads, activation = _KNOWN[width]
    vision = {
        "hidden_size": width,
        "intermediate_size": int(inner),
        "num_hidden_layers": _layers(tensors, "vision_model"),
        "num_attention_heads": heads,
        "image_size": patch * math.isqrt(int(positions) - 1),
        "patch_size": patch,
        "hidden_act": activation,
        "projection_dim": int(projection),
    }
    settings: dict[str, Any] = {"vision_config": vision, "projection_dim": int(projection)}
    if end_token is not None:
        vocabulary, width = tensors["text_model.embeddings.token_embedding.weight"].shape
        settings["text_config"] = {
            "vocab_size": int(vocabulary),
            "hidden_size": int(width),
            "intermediate_size": int(
                tensors["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0]
            ),
            "num_hidden_layers": _layers(tensors, "text_model"),
            "num_attention_heads": max(1, int(width) // 64),
            "max_position_embeddings": int(
                tensors["text_model.embeddings.position_embedding.weight"].shape[0]
            ),
            "hidden_act": activation,
            "eos_token_id": end_token,
            "projection_dim": int(projection),
        }
    return settings


def _layers(tensors: Tensors, side: str) -> int:
    found = (re.match(rf"{side}\.encoder\.layers\.(\d+)\.", name) for name in tensors)
    return 1 + max(int(match[1]) for match in found if match)


#: OpenCLIP's names -> those of transformers, for what is only renamed.
_RENAMED = (
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.ln_(\d)\.", r".layer_norm\1."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
_TRANSPOSED = {
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
}


def _as_transformers(tensors: Tensors, path: Path) -> Tensors:
    """OpenCLIP's weights under the names of transformers; others as they are."""
    if "visual.conv1.weight" not in tensors:
        return tensors
    found: dict[str, torch.Tensor] = {}
    for name in tensors:
        if name == "attn_mask":  # a buffer
            continue
        tensor = tensors[name]
        if name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = tensor.T
            continue
        joined = re.fullmatch(r"(.+)\.attn\.in_proj_(weight|bias)", name)
        new = name if joined is None else f"{joined[1]}.self_attn.@.{joined[2]}"
        for pattern, replacement in _RENAMED:
            new = re.sub(pattern, replacement, new)
        if joined is None:
            found[new] = tensor
        else:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                found[new.replace("@", f"{part}_proj")] = piece
    return found
