"""The CLIP vision model (ViT-H) whose tokens Wan 2.1 image-to-video attends to."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from ..errors import FlashGRPOError
from ..files import TensorFile, open_tensors
from .detect import kind_of
from .weights import Weights, fill, finish, name_map

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_PREFIX = "vision_model."
_HEADS = {1280: 16}  # ViT-H; other widths are test models with heads of 64 channels
_ADVICE = "choose clip_vision_h.safetensors from ComfyUI's clip_vision folder"


def clip_vision_config(file: TensorFile) -> CLIPVisionConfig:
    """Architecture from tensor shapes.

    Raises:
        FlashGRPOError: another kind of file (named).
    """
    patches = f"{_PREFIX}embeddings.patch_embedding.weight"
    up = f"{_PREFIX}encoder.layers.0.mlp.fc1.weight"
    places = f"{_PREFIX}embeddings.position_embedding.weight"
    if any(key not in file for key in (patches, up, places)):
        raise FlashGRPOError(
            f"{file.path}: this is {kind_of(file)}, not a CLIP vision model in the layout of "
            f"transformers; {_ADVICE}"
        )
    width, _, patch, _ = file.shape(patches)
    pattern = re.compile(rf"{re.escape(_PREFIX)}encoder\.layers\.(\d+)\.")
    layers = {int(match[1]) for key in file.keys() if (match := pattern.match(key))}
    return CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=file.shape(up)[0],
        num_hidden_layers=max(layers) + 1,
        num_attention_heads=_HEADS.get(width, max(1, width // 64)),
        image_size=patch * math.isqrt(file.shape(places)[0] - 1),
        patch_size=patch,
        hidden_act="gelu",
    )


def load_clip_vision(path: str | Path, device: torch.device | str, width: int) -> nn.Module:
    """Load the model in fp32, which is what its small part of the work deserves.

    Args:
        path: ComfyUI's `clip_vision_h.safetensors`, or another of the layout of transformers.
        device: where it goes.
        width: image width that the Wan model expects (1280).

    Raises:
        FlashGRPOError: another kind of file, unknown or missing keys, or another width.
    """
    file = open_tensors(path)
    config = clip_vision_config(file)
    if config.hidden_size != width:
        raise FlashGRPOError(
            f"{file.path}: CLIP vision width {config.hidden_size}, the Wan model needs {width}; "
            f"{_ADVICE}"
        )
    with torch.device("meta"):
        model = CLIPVisionModel(config)
    # The projection to the text's space is in the file, but Wan takes tokens before it.
    weights = Weights(file, ignore=_unused(file))
    bare = not any(key.startswith(_PREFIX) for key in model.state_dict())
    names = name_map(weights, lambda name: name.removeprefix(_PREFIX) if bare else name)
    fill(model, weights, names, torch.float32, device)
    for module in model.modules():
        if "position_ids" in module._buffers:  # counted, not stored
            places = module.position_embedding.num_embeddings
            module._buffers["position_ids"] = torch.arange(places, device=device)[None]
    finish(model)
    return model


def _unused(file: TensorFile) -> list[str]:
    ends = (".position_ids", "visual_projection.weight", "logit_scale")
    return [key for key in file.keys() if key.endswith(ends) or key.startswith("text_model.")]


@torch.no_grad()
def image_tokens(model: Any, image: np.ndarray) -> torch.Tensor:
    """Tokens of an image from the second-to-last layer.

    Args:
        model: from `load_clip_vision`.
        image: uint8 `[H, W, 3]`; it is squeezed to a square, as Wan does.

    Returns:
        fp32 `[n, width]` on the CPU, n = 257 for ViT-H.
    """
    device, size = next(model.parameters()).device, model.config.image_size
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255.0
    if pixels.shape[-2:] != (size, size):
        pixels = nn.functional.interpolate(pixels, (size, size), mode="bicubic", antialias=True)
    pixels = (255.0 * pixels).clip(0, 255).round() / 255.0
    shape = (1, 3, 1, 1)
    pixels = (pixels - torch.tensor(_MEAN).reshape(shape)) / torch.tensor(_STD).reshape(shape)
    out = model(pixel_values=pixels.to(device), output_hidden_states=True)
    return out.hidden_states[-2][0].float().cpu()
