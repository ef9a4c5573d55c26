"""How much the gradient of each SDE step says, measured while training, and draws that follow it.

The gradient of one group at step k is mu_k plus noise of covariance C_k. `StepSignals` estimates the
signal-to-noise ratio |mu_k| / sqrt(tr C_k) from the groups of past iterations. A LoRA gradient is
too large to keep one of per step, so it keeps sketches: sums of the elements, each with a random
sign, into `SKETCH` buckets. The inner product of two sketches is an unbiased estimate of that of the
gradients. With weights w that fade by `DECAY` per iteration, W = sum w, rho = sum w^2 / W^2,

    E |sum w s / W|^2 = |mu|^2 + rho tr C,      E sum w |s|^2 / W = |mu|^2 + tr C.

Steps are drawn with probabilities p_k that rise with that ratio but keep a floor, and a group drawn
at step k gets the importance weight 1 / (K m_k), where m_k is the probability that a given group
gets step k. So the expected gradient is that of a uniform draw, whatever the measurements say: they
come from earlier iterations only. Draws in which all groups agree are repeated, as for every other
draw (an update over a single noise level collapses), which makes

    m_k = (p_k - p_k^n) / (1 - sum_j p_j^n)      for n groups.

What stays biased: an advantage divided by a std of the same update (use `loss.freeze_std` or
`advantage_std = none`; the first iteration has no past), the clamp of advantages, and the mean over
the samples that are left when groups without variance drop out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from .schedule import Window
from .seeds import generator

#: Buckets of a gradient sketch: inner products are right to about |a| |b| sqrt(2 / SKETCH).
SKETCH = 128
#: What is left of a measurement's weight after an iteration.
DECAY = 0.9


class Sketcher:
    """Random sums of a gradient's elements, the same for every gradient of a policy."""

    def __init__(self) -> None:
        self._signs: dict[str, torch.Tensor] = {}

    def add(self, sums: torch.Tensor, name: str, part: torch.Tensor) -> None:
        """Add the sketch of one tensor's gradient to `sums`, float64 `[SKETCH]`."""
        if name not in self._signs:
            drawn = torch.randint(2, (part.numel(),), generator=generator(name, "sketch"))
            self._signs[name] = (2 * drawn - 1).to(part.device, torch.int8)
        flat = part.flatten() * self._signs[name]
        whole = flat.numel() // SKETCH * SKETCH
        sums += flat[:whole].view(-1, SKETCH).sum(0)
        sums[: flat.numel() - whole] += flat[whole:]


class StepSignals:
    """Faded sums over past iterations, per SDE step.

    Args:
        steps: number of steps of the schedule.
    """

    def __init__(self, steps: int) -> None:
        self.weight = torch.zeros(steps, dtype=torch.float64)
        self.weight_squared = torch.zeros(steps, dtype=torch.float64)
        self.sketch = torch.zeros(steps, SKETCH, dtype=torch.float64)
        self.square = torch.zeros(steps, dtype=torch.float64)

    def add(self, steps: Sequence[int], sketches: np.ndarray) -> None:
        """Take in one iteration: the step and the sketch `[SKETCH]` of each group's gradient."""
        self.weight *= DECAY
        self.weight_squared *= DECAY**2
        self.sketch *= DECAY
        self.square *= DECAY
        for step, row in zip(steps, torch.from_numpy(sketches).double(), strict=True):
            self.weight[step] += 1
            self.weight_squared[step] += 1
            self.sketch[step] += row
            self.square[step] += float(row.square().sum())

    def ratios(self, window: Window) -> np.ndarray:
        """|mu| / sqrt(tr C) of the window's steps, float64 `[K]`; NaN where nothing is known."""
        found = np.full(window[1] - window[0], np.nan)
        for i, step in enumerate(range(*window)):
            weight = float(self.weight[step])
            rho = float(self.weight_squared[step]) / weight**2 if weight > 0 else 1.0
            if rho > 1 - 1e-9:
                continue  # fewer than two groups so far
            square = float(self.square[step]) / weight
            mean = float((self.sketch[step] / weight).square().sum())
            signal = max((mean - rho * square) / (1 - rho), 0.0)
            noise = max(square - signal, 1e-12 * square)
            found[i] = np.sqrt(signal / noise) if noise > 0 else 0.0
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the sums, for a checkpoint."""
        return {name: value.clone() for name, value in vars(self).items()}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`."""
        for name in vars(self):
            setattr(self, name, tensors[name].clone())


def step_probabilities(ratios: np.ndarray, floor: float) -> np.ndarray:
    """Probabilities in proportion to the ratios, of which a share is spread evenly.

    Args:
        ratios: signal-to-noise per step `[K]`; a step of which nothing is known counts as the mean.
        floor: each probability is at least floor / K.
    """
    known = ratios[~np.isnan(ratios)]
    filled = np.where(np.isnan(ratios), known.mean() if len(known) else 1.0, ratios)
    if filled.sum() <= 0:
        filled = np.ones(len(ratios))
    return floor / len(ratios) + (1 - floor) * filled / filled.sum()


def draw_by(
    probabilities: np.ndarray, count: int, seed: torch.Generator
) -> tuple[list[int], list[float]]:
    """Independent draws that do not all agree, and the importance weight of each.

    Args:
        probabilities: per step `[K]`, all above 0.
        count: groups, at least 2.
        seed: where the draws come from.

    Returns:
        Indices 0..K-1 and weights 1 / (K m).
    """
    p = torch.from_numpy(probabilities)
    drawn = torch.multinomial(p, count, replacement=True, generator=seed)
    while bool((drawn == drawn[0]).all()):
        drawn = torch.multinomial(p, count, replacement=True, generator=seed)
    marginal = (probabilities - probabilities**count) / (1 - (probabilities**count).sum())
    indices = [int(i) for i in drawn]
    return indices, [float(1 / (len(probabilities) * marginal[i])) for i in indices]
