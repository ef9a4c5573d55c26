"""Rewards that compare frames and prompt in CLIP's space: CLIPScore, PickScore, HPSv2.1."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .clip import Clip, crop_frames, load_clip, pad_frames
from .model_reward import FrameReward


class ClipScoreReward(FrameReward):
    """Cosine between CLIP's vectors of frame and prompt (Hessel et al., EMNLP 2021, unscaled).

    Args:
        model: a CLIP model: folder, or weights file.
        tokenizer: folder of CLIP's vocab.json and merges.txt; empty is the model's folder.
        frames: how the frames' scores become the video's (see `options.AGGREGATES`).
        every: use every n-th frame.
        batch: frames per forward.
        dtype: `auto` (bf16 on a GPU, fp32 on the CPU), `fp32`, `bf16` or `fp16`.
        device: `auto`, `cpu`, `cuda:1`, ...
    """

    name = "clipscore"
    title = "CLIPScore"
    description = "Rewards frames that show what the prompt says, by CLIP."
    range = "-1 .. 1, in practice about 0.15 .. 0.35"
    direction = "higher is better"
    hackable_by = "written words, collages of the prompt's objects; blind to movement and faults"
    memory = "0.6 GB (base, fp32) to 1.7 GB (large, fp32)"
    licence = "code of OpenAI's CLIP: MIT; see the model card for the weights"
    source = (
        "get the folder of openai/clip-vit-large-patch14 or openai/clip-vit-base-patch32 (hub names) "
        "with config.json, model.safetensors, vocab.json and merges.txt"
    )
    files = {"model": "reward", "tokenizer": "reward"}

    def __init__(
        self,
        model: str,
        tokenizer: str = "",
        frames: str = "mean",
        every: int = 1,
        batch: int = 16,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__(batch, frames, every, dtype, device, model=model, tokenizer=tokenizer)

    def _load(self, dtype: torch.dtype) -> Clip:
        return load_clip(self.paths["model"], dtype, tokenizer=self.paths.get("tokenizer"))

    def _score_frames(self, model: Clip, frames: np.ndarray, prompt: str) -> torch.Tensor:
        return self._cosines(model, crop_frames(frames, model.size), prompt)

    def _cosines(self, model: Clip, pixels: torch.Tensor, prompt: str) -> torch.Tensor:
        images = model.image_vectors(pixels)  # [n, d]
        return images @ model.text_vector(prompt).to(images.device)


class PickScoreReward(ClipScoreReward):
    """PickScore (Kirstain et al., NeurIPS 2023): a CLIP H/14 tuned on people's choices.

    The logit of frame and prompt, divided by 26 as usual in reinforcement learning. Arguments as
    `ClipScoreReward`.
    """

    name = "pickscore"
    title = "PickScore"
    description = "Rewards frames that people would pick for the prompt, by PickScore."
    range = "about 0.7 .. 1 (the raw logit divided by 26)"
    hackable_by = "glossy, over-sharpened, saturated pictures; blind to movement"
    memory = "2.0 GB (bf16), 3.9 GB (fp32)"
    licence = "see the model card of the weights"
    source = (
        "get the folder of yuvalkirstain/PickScore_v1 (hub name) with config.json, "
        "model.safetensors, vocab.json and merges.txt"
    )

    def _score_frames(self, model: Clip, frames: np.ndarray, prompt: str) -> torch.Tensor:
        cosines = super()._score_frames(model, frames, prompt)
        scale: Any = model.network.logit_scale
        return scale.float().exp() * cosines / 26


class HpsV2Reward(ClipScoreReward):
    """HPSv2 and 2.1 (Wu et al., 2023): a CLIP H/14 tuned on people's rankings.

    Frames keep their shape: the long side becomes 224 pixels, the rest is black. Arguments as
    `ClipScoreReward`.
    """

    name = "hpsv2"
    title = "HPSv2.1"
    description = "Rewards frames that people would rank high for the prompt, by HPSv2.1."
    range = "-1 .. 1, in practice about 0.2 .. 0.35"
    hackable_by = "a glossy, saturated style; blind to movement"
    memory = "2.0 GB (bf16), 3.9 GB (fp32)"
    licence = "code Apache-2.0; see the model card for the weights"
    source = (
        "get HPS_v2.1_compressed.pt of xswu/HPSv2 (hub name), or a folder of it in the layout of "
        "transformers, and CLIP's vocab.json and merges.txt"
    )

    def _score_frames(self, model: Clip, frames: np.ndarray, prompt: str) -> torch.Tensor:
        return self._cosines(model, pad_frames(frames, model.size), prompt)
