"""The `technical` reward: videos without technical faults."""

from __future__ import annotations

import math

import numpy as np
import torch

from . import measures
from .batch import VideoBatch
from .flow import luma, shrink
from .options import number

#: The faults, and how much of the total each one takes at its worst.
STRENGTHS = {
    "blur": 1.0,
    "noise": 0.6,
    "exposure": 0.6,
    "flicker": 0.8,
    "freeze": 0.8,
    "blocks": 0.6,
}


class TechnicalReward:
    """Sharp, clean, well exposed, steady, not frozen and without a grid; no weights.

    Six faults are measured, each from 0 (none) to 1 (worst), and reported as parts. The reward is
    the product over the faults of `1 - strength * fault`, so that no virtue pays for a fault.

    - blur: the blur effect of Crete et al. 2007, from 0.2 (crisp) to 0.9;
    - noise: 1 - exp(-sigma / 12), sigma in grey levels after Immerkaer 1996;
    - exposure: share of nearly black or white pixels beyond 5 percent, worst at 65 percent;
    - flicker: 1 - exp(-swing / 4), swing in grey levels (see `measures.flicker`);
    - freeze: share of frame pairs without any change (see `measures.freeze`);
    - blocks: a fixed grid of 8 or 16 pixels (see `measures.blocks`), from 0.1 to 0.4.

    Blur, noise, exposure and blocks are means over the frames. Clips of one frame neither flicker
    nor freeze.

    Args:
        blur: strength of the fault, 0 (ignored) .. 1 (a fully blurred video scores 0).
        noise: likewise.
        exposure: likewise.
        flicker: likewise.
        freeze: likewise.
        blocks: likewise.
        short_side: larger frames are scaled down to this short side first, pixels.
    """

    name = "technical"
    uses_prompt = False
    parts = tuple(STRENGTHS)
    title = "Technical quality"
    description = (
        "Rewards videos that are sharp, clean, well exposed, steady, not frozen and without a grid."
    )
    range = "0 (unusable) .. 1 (no measurable fault)"
    direction = "higher is better"
    hackable_by = (
        "hard edges and over-sharpening, flat cartoon-like surfaces (no noise), high contrast just "
        "short of clipping. Soft focus and grain that the prompt asks for are taken for faults"
    )
    cost = "0.03 s per frame of 832x480 on one CPU core; no weights"

    def __init__(
        self,
        blur: float = STRENGTHS["blur"],
        noise: float = STRENGTHS["noise"],
        exposure: float = STRENGTHS["exposure"],
        flicker: float = STRENGTHS["flicker"],
        freeze: float = STRENGTHS["freeze"],
        blocks: float = STRENGTHS["blocks"],
        short_side: int = 512,
    ) -> None:
        given = {
            "blur": blur,
            "noise": noise,
            "exposure": exposure,
            "flicker": flicker,
            "freeze": freeze,
            "blocks": blocks,
        }
        self.strengths = {key: number(self.name, key, v, 0.0, 1.0) for key, v in given.items()}
        self.short_side = int(number(self.name, "short_side", short_side, 32, 4096))

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class."""
        rows = [self._faults(video) for video in batch.videos]
        total = np.ones(len(batch))
        parts: dict[str, np.ndarray] = {}
        for key, strength in self.strengths.items():
            fault = np.array([row[key] for row in rows], dtype=np.float64)
            total = total * (1 - strength * fault)
            parts[f"{self.name}.{key}"] = fault
        return {self.name: total, **parts}

    def _faults(self, video: np.ndarray) -> dict[str, float]:
        sigma = blurred = clipped = 0.0
        grids: list[torch.Tensor] = []
        places = torch.zeros(2, 16, dtype=torch.float64)
        for frame in video:  # one frame at a time: a long clip in float32 is large
            full = luma(frame[None])
            # Noise lives in the single pixel and clipping is exact there: not after scaling.
            sigma += float(measures.noise(full)[0]) / len(video)
            clipped += float(measures.clipping(full)[0]) / len(video)
            blurred += float(measures.blur(shrink(full, self.short_side))[0]) / len(video)
            grids.append(measures.block_means(full))
            places += measures.ridges(full)[0] / len(video)
        grid = torch.cat(grids)
        grain = sigma * math.sqrt(grid[0].numel() / (video.shape[1] * video.shape[2]))
        return {
            "blur": _ramp(blurred, 1 / 3, 1.0),
            "noise": 1 - math.exp(-sigma / 12),
            "exposure": _ramp(clipped, 0.05, 0.65),
            "flicker": 1 - math.exp(-measures.flicker(grid, grain) / 4),
            "freeze": measures.freeze(grid, grain),
            "blocks": _ramp(measures.blocks(places), 0.1, 0.4),
        }


def _ramp(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))
