"""The `diversity` reward: a group whose videos differ from each other."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from .batch import VideoBatch
from .flow import luma
from .options import number

_GRID = 4  # blocks along each side
_TIMES = 3  # thirds of the clip


class DiversityReward:
    """Mean distance of a video from the others of its group.

    Each video becomes a short vector: the mean colours of a 4x4 grid in the three thirds of the
    clip (what is where, and when), and the strength of movement and of detail in the same grid. The
    distance of two videos is `d = sqrt(mean of squared differences)`, the numbers in 0..1; the
    reward is the mean over the others of `1 - exp(-d / scale)`. A group of one is not diverse: 0.

    Only the vectors are gathered from all processes, never videos.

    Args:
        scale: distance that counts 0.63.
    """

    name = "diversity"
    uses_prompt = False
    title = "Diversity"
    description = "Rewards videos that differ from the others of their prompt."
    range = "0 (all alike) .. 1 (nothing in common)"
    direction = "higher is better"
    hackable_by = (
        "random colours, empty or broken videos: whatever is unlike the rest. Give it a small "
        "weight, and a gate on quality"
    )
    cost = "0.02 s per frame of 832x480 on one CPU core; no weights"
    #: Length of the feature vector.
    feature_size = _GRID * _GRID * (3 * _TIMES + 2)

    def __init__(self, scale: float = 0.1) -> None:
        self.scale = number(self.name, "scale", scale, 0.001, 10.0)

    def features(self, batch: VideoBatch) -> np.ndarray:
        """The vectors, float64 `[B, feature_size]`."""
        rows = [_describe(video) for video in batch.videos]
        return np.array(rows, dtype=np.float64).reshape(-1, self.feature_size)

    def compare(self, features: np.ndarray) -> np.ndarray:
        """Diversity of the `n` videos of one group, float64 `[n]`."""
        count = len(features)
        if count < 2:
            return np.zeros(count)
        gaps = features[:, None] - features[None]  # [n, n, D]
        distance = np.sqrt((gaps**2).mean(-1))
        return (1 - np.exp(-distance / self.scale)).sum(1) / (count - 1)


def _describe(video: np.ndarray) -> np.ndarray:
    """Feature vector of one video, uint8 `[T, H, W, 3]`."""
    colours = torch.stack([_grid(_colour(frame)) for frame in video])  # [T, 3, g, g]
    last = len(video)
    thirds = [
        colours[t * last // _TIMES : max(t * last // _TIMES + 1, (t + 1) * last // _TIMES)].mean(0)
        for t in range(_TIMES)
    ]
    movement = detail = torch.zeros(1, _GRID, _GRID, dtype=torch.float64)
    previous: torch.Tensor | None = None
    for frame in video:
        grey = luma(frame[None]).double() / 255  # [1, H, W]
        mean = F.avg_pool2d(grey, 3, stride=1, padding=1, count_include_pad=False)
        detail = detail + _grid((grey - mean).abs()) / last
        if previous is not None:
            movement = movement + _grid((grey - previous).abs()) / (last - 1)
        previous = grey
    return torch.cat([*thirds, movement, detail]).flatten().numpy()


def _colour(frame: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1).double() / 255


def _grid(image: torch.Tensor) -> torch.Tensor:
    """Means over the grid: `[C, H, W]` to `[C, g, g]`."""
    return F.adaptive_avg_pool2d(image[None], _GRID)[0]
