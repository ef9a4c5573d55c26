"""The `loop_closure` reward: videos that end where they began."""

from __future__ import annotations

import numpy as np
import torch

from . import measures
from .batch import VideoBatch
from .flow import luma


class LoopClosureReward:
    """How well the last frame leads back to the first, for clips that are played in a loop.

    On the grid of `measures.block_means`, with `d(i, j)` the mean absolute difference of two frames
    in grey levels: `gap` is what `d(last, first)` exceeds an ordinary step between neighbouring
    frames by, `reach` the largest `d(first, t)`. The reward is `(1 - gap / reach) * reach / (reach
    + 1)`: the second factor takes the prize from still pictures, which close every loop. A clip of
    one frame scores 0.
    """

    name = "loop_closure"
    uses_prompt = False
    title = "Loop closure"
    description = "Rewards videos whose last frame leads smoothly back to the first."
    range = "0 (ends elsewhere, or does not move) .. 1 (a seamless loop)"
    direction = "higher is better"
    hackable_by = "tiny movements to and fro, fading in and out. Weigh it against motion"
    cost = "0.01 s per frame of 832x480 on one CPU core; no weights"

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class."""
        return {self.name: np.array([_closure(v) for v in batch.videos], dtype=np.float64)}


def _closure(video: np.ndarray) -> float:
    grid = torch.cat([measures.block_means(luma(frame[None])) for frame in video]).double()
    if len(grid) < 2:
        return 0.0
    from_first = (grid - grid[0]).abs().mean((1, 2))
    step = float(grid.diff(dim=0).abs().mean((1, 2)).median())
    reach = float(from_first.max())
    if reach == 0:
        return 0.0
    gap = max(0.0, float(from_first[-1]) - step)
    return (1 - gap / reach) * reach / (reach + 1)
