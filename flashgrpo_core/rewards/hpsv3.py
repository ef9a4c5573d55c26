"""HPSv3: human preference for frames, by a Qwen2-VL 7B with a reward head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from .checkpoint import read_tensors
from .clip import resize_pil, to_planes
from .model_reward import FrameReward
from .options import number
from .qwen_vl import QwenReward, fit_size, load_qwen_reward, plain

#: Pixels of a frame, both the least and the most.
PIXELS = 256 * 28 * 28

_TEXT = Path(__file__).parents[1] / "assets" / "reward_prompts" / "hpsv3.txt"


class HpsV3Reward(FrameReward):
    """HPSv3 (Ma et al., ICCV 2025): the mean of the two values that its head gives.

    The head works in fp32. Frames are resized to about 200 000 pixels.

    Args:
        model: folder with HPSv3.safetensors and the base model's config.json and tokenizer.json.
        limit: scores are limited to -limit .. limit: messy frames are sometimes scored far too
            high.
        frames: how the frames' scores become the video's (see `options.AGGREGATES`).
        every: use every n-th frame.
        batch: frames per forward.
        dtype: `auto` (bf16 on a GPU, fp32 on the CPU), `fp32`, `bf16` or `fp16`.
        device: `auto`, `cpu`, `cuda:1`, ...
    """

    name = "hpsv3"
    title = "HPSv3"
    description = "Rewards frames that people would prefer for the prompt, by HPSv3."
    range = "unbounded, in practice about -5 .. 15"
    direction = "higher is better"
    hackable_by = "crowded, over-detailed pictures; blind to movement"
    memory = "16.6 GB (bf16)"
    licence = "code MIT; see the model card for the weights"
    source = (
        "make a folder with HPSv3.safetensors of MizzenAI/HPSv3 and config.json and tokenizer.json "
        "of Qwen/Qwen2-VL-7B-Instruct (hub names; its weights are not needed)"
    )
    files = {"model": "reward"}

    def __init__(
        self,
        model: str,
        limit: float = 15.0,
        frames: str = "mean",
        every: int = 4,
        batch: int = 4,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__(batch, frames, every, dtype, device, model=model)
        self.limit = number(self.name, "limit", limit, 0.1, 1000)

    def _load(self, dtype: torch.dtype) -> QwenReward:
        path = self.paths["model"]
        folder = path if path.is_dir() else path.parent
        tensors = read_tensors(path)
        width = tensors["rm_head.0.weight"].shape[1] if "rm_head.0.weight" in tensors else 1
        head = nn.Sequential(
            nn.Linear(width, 1024),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(1024, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )
        return load_qwen_reward(folder, tensors, path, ["<|Reward|>"], dtype, head, fp32_head=True)

    def _score_frames(self, model: QwenReward, frames: np.ndarray, prompt: str) -> torch.Tensor:
        factor = model.patch * model.merge
        height, width = frames.shape[1:3]
        height, width = fit_size(height, width, factor, PIXELS, PIXELS)
        planes = to_planes(resize_pil(frames, height, width))
        text = _TEXT.read_text(encoding="utf-8").replace("{text_prompt}", plain(prompt))
        mean = model("image", text, planes, clip=False)[:, 0, 0]  # the other value is sigma
        return mean.clamp(-self.limit, self.limit)
