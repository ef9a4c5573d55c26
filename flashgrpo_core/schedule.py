"""Sigma schedules of flow-matching samplers.

All three grids shift a grid u by `sigma = s * u / (1 + (s - 1) * u)`; they differ in u by about
0.1 %, which is enough to make weights that are computed for one wrong for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from .errors import FlashGRPOError

SCHEDULES = ("simple", "unipc-a", "unipc-b")

#: Largest flow shift that is taken for serious.
MAX_SHIFT = 100.0

#: Training timesteps of Wan; a timestep is `TRAIN_STEPS * sigma`.
TRAIN_STEPS = 1000


#: Half-open range of steps `[first, end)`.
Window = tuple[int, int]


def as_windows(window: Window | Sequence[Window]) -> list[Window]:
    """A window, or the windows of several experts, as a list."""
    several = [w for w in window if isinstance(w, tuple)]
    return several or [cast(Window, tuple(window))]


@dataclass(frozen=True)
class Schedule:
    """Noise levels of one sampling run.

    Attributes:
        kind: `simple`, `unipc-a` or `unipc-b`.
        shift: flow shift.
        sigmas: float64 `[N + 1]`, decreasing, last entry 0.
        timesteps: float64 `[N]`, what the transformer is told at each step.
    """

    kind: str
    shift: float
    sigmas: np.ndarray
    timesteps: np.ndarray

    @property
    def steps(self) -> int:
        """Number of denoising steps N."""
        return len(self.timesteps)

    @property
    def dt(self) -> np.ndarray:
        """`sigma_next - sigma` per step, negative, float64 `[N]`."""
        return np.diff(self.sigmas)


def make_schedule(kind: str, steps: int, shift: float) -> Schedule:
    """Build a schedule.

    Args:
        kind: `simple` is ComfyUI's scheduler of that name over its 1000-entry table; `unipc-a` is
            diffusers' UniPC with flow sigmas up to 0.35, which the paper used; `unipc-b` the same
            in newer diffusers.
        steps: denoising steps, 2 to 1000.
        shift: flow shift, above 0, at most 100.

    Raises:
        FlashGRPOError: unknown kind, or steps or shift out of range.
    """
    if kind not in SCHEDULES:
        raise FlashGRPOError(
            f"schedule kind {kind!r} is unknown: choose one of {', '.join(SCHEDULES)}"
        )
    if not 2 <= steps <= TRAIN_STEPS:
        raise FlashGRPOError(f"schedule steps {steps} is outside 2 to {TRAIN_STEPS}: use e.g. 20")
    if not 0 < shift <= MAX_SHIFT:
        raise FlashGRPOError(
            f"flow shift {shift} is outside 0 to {MAX_SHIFT:g}: use e.g. 3.0 (480p) or 5.0 (720p)"
        )
    # The same arithmetic as in diffusers, so that whole timesteps are cut off at the same places.
    ramp = np.linspace(1, 1 / TRAIN_STEPS, steps + 1)
    if kind == "simple":
        # ComfyUI picks table entries by truncated index, so u is a multiple of 1/1000.
        stride = TRAIN_STEPS / steps
        u = (TRAIN_STEPS - np.array([int(x * stride) for x in range(steps)])) / TRAIN_STEPS
    elif kind == "unipc-a":
        u = (1 - ramp)[:0:-1]
    else:
        u = ramp[:-1]
    sigmas = shift * u / (1 + (shift - 1) * u)
    if kind == "unipc-b":
        sigmas[0] -= 1e-6
    timesteps = TRAIN_STEPS * sigmas
    if kind != "simple":
        # diffusers hands the transformer whole timesteps; ComfyUI hands it 1000 * sigma.
        timesteps = np.floor(timesteps)
    return Schedule(kind, float(shift), np.append(sigmas, 0.0), timesteps)
