"""The `naturalness` reward: frames with the statistics of photographs.

Photographs of any subject have the same statistics once local brightness and contrast are divided
out (Ruderman, Network 1994); blur, noise and artefacts change them, each in its own way. BRISQUE,
"No-reference image quality assessment in the spatial domain" (Mittal, Moorthy, Bovik, TIP 2012),
takes features of them and a trained regression; the terms of its training data are unclear, so
nothing of it is used. The reward here is the distance from the features of eight public
photographs, the idea of NIQE (Mittal, Soundararajan, Bovik, SPL 2013).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from .batch import VideoBatch
from .flow import luma, shrink
from .options import frame_rule, number

_SHAPES = torch.arange(0.2, 10.0, 0.001, dtype=torch.float64)
# Moment ratios of the generalised Gaussian by shape: (E|x|)^2 / E x^2.
_RATIOS = torch.exp(
    2 * torch.special.gammaln(2 / _SHAPES)
    - torch.special.gammaln(1 / _SHAPES)
    - torch.special.gammaln(3 / _SHAPES)
)
_SMALLEST = 16  # pixels of the short side below which statistics mean nothing
_FAR = 20.0  # distance beyond which further is not counted
# The 10 features over photographs: mean, and the inverse square root of their covariance
# (`benchmarks/naturalness_reference.py`).
_MEAN = (2.1914, -0.8923, 0.3058, 0.0797, -0.0018, 2.3414, -0.8380, 0.3004, 0.0901, 0.0534)
_WHITEN = (
    (3.909, -1.828, -0.256, -0.193, -0.070, -2.069, 1.328, 0.260, -0.267, 0.760),
    (-1.828, 30.262, 9.110, 3.258, -2.608, 0.442, -25.706, 3.133, 1.257, 0.347),
    (-0.256, 9.110, 27.389, -13.231, 2.173, -0.494, -8.052, -10.024, 10.239, -2.224),
    (-0.193, 3.258, -13.231, 35.945, -5.959, 0.255, -4.428, 1.873, -17.353, 9.531),
    (-0.070, -2.608, 2.173, -5.959, 31.702, -0.189, 2.755, -17.843, 11.581, -10.023),
    (-2.069, 0.442, -0.494, 0.255, -0.189, 2.471, -1.299, -0.122, 0.177, -0.490),
    (1.328, -25.706, -8.052, -4.428, 2.755, -1.299, 26.523, -2.670, -1.008, -0.049),
    (0.260, 3.133, -10.024, 1.873, -17.843, -0.122, -2.670, 31.293, -13.302, 1.524),
    (-0.267, 1.257, 10.239, -17.353, 11.581, 0.177, -1.008, -13.302, 26.268, -4.267),
    (0.760, 0.347, -2.224, 9.531, -10.023, -0.490, -0.049, 1.524, -4.267, 23.376),
)


class NaturalnessReward:
    """Closeness of the frames to the statistics of photographs.

    `exp(-max(0, d - 1) / tolerance)`, where `d` is the distance of ten features from those of
    photographs, in standard deviations of photographs (Mahalanobis, root mean square over the
    features): a photograph has d near 1. The part `naturalness.distance` is the mean d. Frames with
    a short side below 16 pixels have the largest distance, 20.

    Args:
        tolerance: excess distance that brings the reward down to 0.37.
        frames: how the frames' scores become the video's (see `options.aggregate`).
        every: use every n-th frame, the first one always.
        short_side: larger frames are scaled down to this short side first, pixels.
    """

    name = "naturalness"
    uses_prompt = False
    title = "Naturalness"
    description = "Rewards frames with the statistics of photographs: no blur, noise or artefacts."
    range = "0 (nothing like a photograph) .. 1 (like a photograph)"
    direction = "higher is better"
    hackable_by = (
        "fine texture everywhere. It punishes cartoons, flat graphics and shallow depth of field, "
        "which are no faults; switch it off for such looks"
    )
    cost = "0.02 s per frame of 832x480 on one CPU core (every 4th by default); no weights"
    parts = ("distance",)

    def __init__(
        self,
        tolerance: float = 1.5,
        frames: str = "mean",
        every: int = 4,
        short_side: int = 512,
    ) -> None:
        self.tolerance = number(self.name, "tolerance", tolerance, 0.01, 100.0)
        self.rule = frame_rule(self.name, frames, every)
        self.short_side = int(number(self.name, "short_side", short_side, 32, 4096))

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class."""
        values, distances = [], []
        for video in batch.videos:
            found = np.array([self._distance(frame) for frame in self.rule.pick(video)])
            values.append(self.rule.total(np.exp(-np.maximum(found - 1, 0) / self.tolerance)))
            distances.append(float(found.mean()))
        return {
            self.name: np.array(values, dtype=np.float64),
            f"{self.name}.distance": np.array(distances, dtype=np.float64),
        }

    def _distance(self, frame: np.ndarray) -> float:
        grey = shrink(luma(frame[None]), self.short_side)[0]
        if min(grey.shape) < _SMALLEST:
            return _FAR
        apart = torch.tensor(_WHITEN, dtype=torch.float64) @ (
            features(grey) - torch.tensor(_MEAN, dtype=torch.float64)
        )
        return min(_FAR, float(apart.square().mean().sqrt()))


def features(grey: torch.Tensor) -> torch.Tensor:
    """Ten features of a grey picture `[H, W]`, 0..255, float64: five each at full and half size.

    Of the map of local contrasts (`_normalised`): the shape of its generalised Gaussian, the log of
    its variance, and the correlation of pixels that are one pixel apart along the axes, one along
    the diagonals, and two along the axes.
    """
    half = F.avg_pool2d(grey[None, None], 2)[0, 0]
    return torch.cat([_of_scale(grey), _of_scale(half)])


def _of_scale(grey: torch.Tensor) -> torch.Tensor:
    x = _normalised(grey).double()
    # A flat picture has no contrast at all: the floor stands for rounding to grey levels.
    variance = x.square().mean() + 1e-4
    shape = _shape(x.abs().mean().square() / variance)
    near = (x[1:] * x[:-1]).mean() + (x[:, 1:] * x[:, :-1]).mean()
    across = (x[1:, 1:] * x[:-1, :-1]).mean() + (x[1:, :-1] * x[:-1, 1:]).mean()
    far = (x[2:] * x[:-2]).mean() + (x[:, 2:] * x[:, :-2]).mean()
    pairs = torch.stack([near, across, far]) / (2 * variance)
    return torch.cat([torch.stack([shape, variance.log()]), pairs])


def _normalised(grey: torch.Tensor) -> torch.Tensor:
    """Mean-subtracted contrast-normalised (MSCN) map `[H, W]`."""
    offset = torch.arange(-3, 4, dtype=grey.dtype)
    line = torch.exp(-0.5 * (offset / (7 / 6)) ** 2)
    line = line / line.sum()

    def smooth(image: torch.Tensor) -> torch.Tensor:
        padded = F.pad(image[None, None], (3, 3, 3, 3), mode="replicate")
        return F.conv2d(F.conv2d(padded, line.view(1, 1, 7, 1)), line.view(1, 1, 1, 7))[0, 0]

    centred = grey - smooth(grey)
    # Of the centred picture: the difference of two large squares would lose its digits.
    variance = smooth(centred.square())
    return centred / (variance.sqrt() + 1)


def _shape(ratio: torch.Tensor) -> torch.Tensor:
    index = torch.searchsorted(_RATIOS, ratio.reshape(1)).clamp(max=len(_SHAPES) - 1)
    return _SHAPES[index[0]]
