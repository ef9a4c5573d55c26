"""The LAION aesthetic predictor: how people rate a picture, from CLIP's vector alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..errors import FlashGRPOError
from .checkpoint import Tensors, read_tensors
from .clip import Clip, crop_frames, load_clip
from .model_reward import FrameReward


class _Predictor(nn.Module):
    """CLIP's vision side and the head, as one network that moves as one."""

    def __init__(self, clip: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.clip = clip
        self.head = head


@dataclass
class _Aesthetic:
    network: _Predictor
    clip: Clip


class AestheticReward(FrameReward):
    """LAION's improved aesthetic predictor (v2) on CLIP L/14.

    The head is a stack of linear layers on the unit vector of a frame.

    Args:
        model: OpenAI's CLIP L/14 (the vision side is enough): folder, or weights file.
        head: weights of the predictor.
        frames: how the frames' scores become the video's (see `options.AGGREGATES`).
        every: use every n-th frame.
        batch: frames per forward.
        dtype: `auto` (bf16 on a GPU, fp32 on the CPU), `fp32`, `bf16` or `fp16`.
        device: `auto`, `cpu`, `cuda:1`, ...
    """

    name = "aesthetic"
    title = "LAION aesthetic"
    description = "Rewards frames that people would rate as beautiful; the prompt plays no part."
    range = "about 1 .. 10"
    direction = "higher is better"
    hackable_by = (
        "painterly, moody, shallow-focus pictures that leave the prompt; blind to movement"
    )
    memory = "0.6 GB (bf16), 1.2 GB (fp32)"
    licence = "see the repository of the predictor and the model card of CLIP"
    source = (
        "get openai/clip-vit-large-patch14 (hub name; a file of it in models/clip_vision will do) "
        "and sac+logos+ava1-l14-linearMSE (.safetensors or .pth) of the improved aesthetic predictor"
    )
    files = {"model": "reward", "head": "reward"}

    def __init__(
        self,
        model: str,
        head: str,
        frames: str = "mean",
        every: int = 1,
        batch: int = 16,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__(batch, frames, every, dtype, device, model=model, head=head)

    def _load(self, dtype: torch.dtype) -> _Aesthetic:
        clip = load_clip(self.paths["model"], dtype, text=False)
        path = self.paths["head"]
        head = _head(read_tensors(path), path)
        width, wanted = clip.network.visual_projection.out_features, head[0].in_features
        if wanted != width:
            raise FlashGRPOError(
                f"reward {self.name!r}: the head takes vectors of {wanted}, the model gives "
                f"{width}: use OpenAI's CLIP L/14 with this head"
            )
        return _Aesthetic(_Predictor(clip.network, head), clip)

    def _score_frames(self, model: _Aesthetic, frames: np.ndarray, prompt: str) -> torch.Tensor:
        vectors = model.clip.image_vectors(crop_frames(frames, model.clip.size))
        return model.network.head(vectors)[:, 0]


#: Places of the linear layers; between them the predictor had dropout. Its variant with
#: activations has others and would load without a word.
_LAYERS = (0, 2, 4, 6, 7)


def _head(tensors: Tensors, path: Path) -> nn.Sequential:
    """The linear layers of the predictor, fp32."""
    names = {i: f"layers.{i}." for i in _LAYERS}
    if set(tensors) != {name + part for name in names.values() for part in ("weight", "bias")}:
        raise FlashGRPOError(
            f"{path}: not the aesthetic predictor (linear layers {', '.join(names.values())}): use "
            "sac+logos+ava1-l14-linearMSE"
        )
    layers = []
    for name in names.values():
        weight = tensors[f"{name}weight"].float()  # [out, in]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": tensors[f"{name}bias"].float()})
        layers.append(layer)
    return nn.Sequential(*layers).eval().requires_grad_(False)
