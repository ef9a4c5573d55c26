"""Rewards on simple properties of single frames: brightness, contrast, colourfulness, JPEG size.

They are what published work uses to check a reinforcement-learning setup (the reward is cheap and
its effect is seen at once), and they bring a style to a look. Frames are scored one by one and
aggregated (`options.aggregate`).
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from .batch import VideoBatch
from .flow import luma
from .options import FrameRule, choice, frame_rule, number


class BrightnessReward:
    """Closeness of the mean brightness to a target, `1 - |b - target| / max(target, 1 - target)`.

    Args:
        target: wanted mean luma, 0 (black) .. 1 (white).
        frames: how the frames' scores become the video's (see `options.aggregate`).
        every: use every n-th frame, the first one always.
    """

    name = "brightness"
    uses_prompt = False
    title = "Brightness"
    description = "Rewards frames whose mean brightness is close to a target."
    range = "0 (as far from the target as possible) .. 1 (on target)"
    direction = "higher is better"
    hackable_by = "flat grey, fog; it says nothing about content. For checks and for a look"
    cost = "0.01 s per frame of 832x480 on one CPU core; no weights"

    def __init__(self, target: float = 0.5, frames: str = "mean", every: int = 1) -> None:
        self.target = number(self.name, "target", target, 0.0, 1.0)
        self.rule = frame_rule(self.name, frames, every)

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class; `brightness.measured` is the mean luma 0..1."""
        return _towards(self.name, self.target, self.rule, batch, _brightness)


class ContrastReward:
    """Closeness of the contrast to a target, `1 - |c - target| / max(target, 1 - target)`.

    Contrast is the standard deviation of the luma over its largest possible value (half the range).

    Args:
        target: wanted contrast, 0 (flat) .. 1 (half black, half white); photos lie near 0.45.
        frames: how the frames' scores become the video's (see `options.aggregate`).
        every: use every n-th frame, the first one always.
    """

    name = "contrast"
    uses_prompt = False
    title = "Contrast"
    description = "Rewards frames whose contrast is close to a target."
    range = "0 (as far from the target as possible) .. 1 (on target)"
    direction = "higher is better"
    hackable_by = "silhouettes, vignettes, black bars; it says nothing about content"
    cost = "0.01 s per frame of 832x480 on one CPU core; no weights"

    def __init__(self, target: float = 0.45, frames: str = "mean", every: int = 1) -> None:
        self.target = number(self.name, "target", target, 0.0, 1.0)
        self.rule = frame_rule(self.name, frames, every)

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class; `contrast.measured` is the contrast 0..1."""
        return _towards(self.name, self.target, self.rule, batch, _contrast)


class ColourfulnessReward:
    """Closeness of the colourfulness to a target, `1 - |c - target| / max(target, 1 - target)`.

    "Measuring colourfulness in natural images" (Hasler, Süsstrunk, SPIE 2003), divided by 109, the
    value that people there call extremely colourful, and limited to 1.

    Args:
        target: wanted colourfulness, 0 (grey) .. 1 (extremely colourful); photos lie near 0.4.
        frames: how the frames' scores become the video's (see `options.aggregate`).
        every: use every n-th frame, the first one always.
    """

    name = "colourfulness"
    uses_prompt = False
    title = "Colourfulness"
    description = "Rewards frames whose colours are as strong as a target."
    range = "0 (as far from the target as possible) .. 1 (on target)"
    direction = "higher is better"
    hackable_by = "over-saturation and colour casts; lower the target when colours get gaudy"
    cost = "0.01 s per frame of 832x480 on one CPU core; no weights"

    def __init__(self, target: float = 0.6, frames: str = "mean", every: int = 1) -> None:
        self.target = number(self.name, "target", target, 0.0, 1.0)
        self.rule = frame_rule(self.name, frames, every)

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class; `colourfulness.measured` is the colourfulness 0..1."""
        return _towards(self.name, self.target, self.rule, batch, _colourfulness)


class JpegSizeReward:
    """Size of the frames as JPEG: the compressibility test of DDPO (Black et al., ICLR 2024).

    The size is counted in bits per pixel, so that it means the same at every resolution.
    `incompressible` is `b / (b + 3)` for `b` bits per pixel, `compressible` is `3 / (b + 3)`.

    Args:
        mode: `compressible` or `incompressible`.
        quality: JPEG quality, 1..95.
        frames: how the frames' scores become the video's (see `options.aggregate`).
        every: use every n-th frame, the first one always.
    """

    name = "jpeg_size"
    uses_prompt = False
    title = "JPEG size"
    description = "Rewards frames that compress well (or badly) as JPEG: a check of the training."
    range = "0 .. 1"
    direction = "higher is better"
    hackable_by = "empty frames (compressible) or noise (incompressible): that is its point"
    cost = "0.01 s per frame of 832x480 on one CPU core; no weights"

    def __init__(
        self, mode: str = "compressible", quality: int = 90, frames: str = "mean", every: int = 1
    ) -> None:
        self.mode = choice(self.name, "mode", mode, ("compressible", "incompressible"))
        self.quality = int(number(self.name, "quality", quality, 1, 95))
        self.rule = frame_rule(self.name, frames, every)

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class; `jpeg_size.bits_per_pixel` is the mean size."""
        values, sizes = [], []
        for video in batch.videos:
            bits = np.array([self._bits_per_pixel(frame) for frame in self.rule.pick(video)])
            good = bits / (bits + 3) if self.mode == "incompressible" else 3 / (bits + 3)
            values.append(self.rule.total(good))
            sizes.append(float(bits.mean()))
        return {
            self.name: np.array(values, dtype=np.float64),
            f"{self.name}.bits_per_pixel": np.array(sizes, dtype=np.float64),
        }

    def _bits_per_pixel(self, frame: np.ndarray) -> float:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG", quality=self.quality)
        return 8 * len(buffer.getvalue()) / (frame.shape[0] * frame.shape[1])


def _towards(
    name: str,
    target: float,
    rule: FrameRule,
    batch: VideoBatch,
    measure: Callable[[np.ndarray], float],
) -> dict[str, np.ndarray]:
    """Score a measure `[H, W, 3] -> 0..1` of each frame by its distance from a target."""
    values, measured = [], []
    for video in batch.videos:
        found = np.array([measure(frame) for frame in rule.pick(video)])
        closeness = 1 - np.abs(found - target) / max(target, 1 - target)
        values.append(rule.total(closeness))
        measured.append(float(found.mean()))
    return {
        name: np.array(values, dtype=np.float64),
        f"{name}.measured": np.array(measured, dtype=np.float64),
    }


def _brightness(frame: np.ndarray) -> float:
    return float(luma(frame[None]).double().mean()) / 255


def _contrast(frame: np.ndarray) -> float:
    return min(1.0, float(luma(frame[None]).double().std(correction=0)) / 127.5)


def _colourfulness(frame: np.ndarray) -> float:
    red, green, blue = np.moveaxis(frame.astype(np.float64), -1, 0)
    red_green = red - green
    yellow_blue = (red + green) / 2 - blue
    spread = np.hypot(red_green.std(), yellow_blue.std())
    shift = np.hypot(red_green.mean(), yellow_blue.mean())
    return min(1.0, float(spread + 0.3 * shift) / 109)
