"""Rewards on how a video changes over time, without optical flow: `flicker` and `freeze`."""

from __future__ import annotations

import math

import numpy as np
import torch

from . import measures
from .batch import VideoBatch
from .flow import luma
from .options import number


class FlickerReward:
    """Steady brightness: `exp(-swing / tolerance)`, swing in grey levels.

    The swing is the mean height of brightness changes that turn round from frame to frame, see
    `measures.flicker`. Fades and steady movement do not count. Clips of fewer than three frames
    cannot flicker: 1.

    Args:
        tolerance: swing in grey levels that brings the reward down to 0.37.
    """

    name = "flicker"
    uses_prompt = False
    title = "No flicker"
    description = "Rewards brightness that does not jump up and down from frame to frame."
    range = "0 (heavy flicker) .. 1 (steady)"
    direction = "higher is better"
    hackable_by = "still videos; slow or little movement. Weigh it against motion"
    cost = "0.01 s per frame of 832x480 on one CPU core; no weights"

    def __init__(self, tolerance: float = 4.0) -> None:
        self.tolerance = number(self.name, "tolerance", tolerance, 0.01, 255.0)

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class; `flicker.swing` is the swing in grey levels."""
        swing = np.array([measures.flicker(*_grid(v)) for v in batch.videos], dtype=np.float64)
        return {self.name: np.exp(-swing / self.tolerance), f"{self.name}.swing": swing}


class FreezeReward:
    """Share of frame pairs in which something moves, see `measures.freeze`.

    A clip of one frame is not frozen: 1.
    """

    name = "freeze"
    uses_prompt = False
    title = "No freeze"
    description = "Rewards videos in which every frame differs from the one before."
    range = "0 (a still picture) .. 1 (every frame brings something new)"
    direction = "higher is better"
    hackable_by = "any change, however senseless: a twitching corner is enough"
    cost = "0.01 s per frame of 832x480 on one CPU core; no weights"

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class."""
        frozen = np.array([measures.freeze(*_grid(v)) for v in batch.videos], dtype=np.float64)
        return {self.name: 1.0 - frozen}


def _grid(video: np.ndarray) -> tuple[torch.Tensor, float]:
    """Block means `[T, h, w]` of a video and the standard deviation of noise in them."""
    sigma = 0.0
    grids: list[torch.Tensor] = []
    for frame in video:
        grey = luma(frame[None])
        sigma += float(measures.noise(grey)[0]) / len(video)
        grids.append(measures.block_means(grey))
    grid = torch.cat(grids)
    return grid, sigma * math.sqrt(grid[0].numel() / (video.shape[1] * video.shape[2]))
