"""Signs that a run goes wrong, read from the records it writes anyway.

No sign stops a run: it becomes a `warning` event in plain words, with what to do. The thresholds
compare means over a window of iterations with the scatter of the iterations inside it, so that
neither the scale of a reward nor the luck of one iteration's prompts decides. What must stop a run
(no usable gradient for several iterations, too many failed scores) is in the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

#: Iterations that are averaged before anything is compared.
WINDOW = 8
#: Differences of means count from this many standard deviations of single iterations on. With
#: `WINDOW` that is five standard errors of the difference: it is looked at after every iteration.
CLEAR = 2.5
#: KL to the reference per latent element from which the policy has left it: the means of the step
#: then differ by 0.45 of its noise. Measured only with loss.kl above 0.
KL_LIMIT = 0.1
#: Share of clipped videos from which an update does little.
CLIP_LIMIT = 0.5
#: Growth of the gradient norm over its usual size that is no accident any more.
GRADIENT_GROWTH = 10.0
#: Iterations in a row for the three limits above.
IN_A_ROW = 3
#: Iterations for which the same sign is not repeated.
QUIET = 25


@dataclass(frozen=True)
class Sign:
    """One thing that looks wrong.

    Attributes:
        code: short name, stable over versions.
        message: what was seen, in numbers, and what to do.
    """

    code: str
    message: str


@dataclass
class Series:
    """Values with the iteration they belong to."""

    iterations: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, iteration: int, value: float | None) -> None:
        """Append a value; those of this and later iterations were undone by a resume."""
        while self.iterations and self.iterations[-1] >= iteration:
            self.iterations.pop()
            self.values.pop()
        if value is not None and math.isfinite(value):
            self.iterations.append(iteration)
            self.values.append(float(value))

    def before(self, iteration: int) -> list[float]:
        """The window that ends at `iteration`."""
        known = [v for i, v in zip(self.iterations, self.values, strict=True) if i <= iteration]
        return known[-WINDOW:]


class Health:
    """Watches the records of one run.

    Args:
        weights: weight of each reward term, by label; a negative one is a penalty.
        history: records from before a resume.
    """

    def __init__(
        self, weights: Mapping[str, float], history: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self.weights = dict(weights)
        self.reward = Series()
        self.terms: dict[str, Series] = {}
        self.kl = Series()
        self.clipped = Series()
        self.gradient = Series()
        self.idle = Series()
        self.held_out = Series()
        self.half_width = Series()
        self._said: dict[str, int] = {}
        for record in history:
            self.observe(record)

    def observe(self, record: Mapping[str, Any]) -> list[Sign]:
        """Take in one event and return the signs that it brings to light."""
        iteration = int(record.get("iteration") or 0)
        if record.get("event") == "iteration":
            self._take(iteration, record)
            found = [
                self._collapse(),
                self._term_falls(),
                self._kl_high(),
                self._clip_high(),
                self._gradient_grows(),
                self._little_signal(),
            ]
        elif record.get("event") == "evaluation" and record.get("split") == "validation":
            self.held_out.add(iteration, record.get("reward_mean"))
            low, high = record.get("ci_low"), record.get("ci_high")
            width = 0.0 if low is None or high is None else (high - low) / 2
            self.half_width.add(iteration, width)
            found = [self._held_out_falls()]
        else:
            return []
        return [sign for sign in found if sign is not None and self._is_news(sign, iteration)]

    def _take(self, iteration: int, record: Mapping[str, Any]) -> None:
        reward = record.get("reward") or {}
        self.reward.add(iteration, reward.get("mean"))
        for label, value in (reward.get("terms") or {}).items():
            self.terms.setdefault(label, Series()).add(iteration, value)
        self.kl.add(iteration, record.get("kl"))
        self.clipped.add(iteration, record.get("clip_fraction"))
        self.gradient.add(iteration, record.get("grad_norm"))
        groups = record.get("groups") or 0
        idle = record.get("zero_variance_groups")
        self.idle.add(iteration, idle / groups if groups and idle is not None else None)

    def _is_news(self, sign: Sign, iteration: int) -> bool:
        last = self._said.get(sign.code)
        if last is not None and 0 <= iteration - last < QUIET:
            return False
        self._said[sign.code] = iteration
        return True

    def _collapse(self) -> Sign | None:
        values = self.reward.values
        if len(values) < 2 * WINDOW:
            return None
        start, recent = values[:WINDOW], values[-WINDOW:]
        windows = [values[i : i + WINDOW] for i in range(len(values) - 2 * WINDOW + 1)]
        best = max(windows, key=mean)
        # One more standard deviation than usual, because `best` is the luckiest of many windows.
        if step(best, recent) > -(CLEAR + 1) or mean(recent) > (mean(start) + mean(best)) / 2:
            return None
        return Sign(
            "reward_collapse",
            f"the reward fell from {mean(best):.4g} to {mean(recent):.4g} (means of {WINDOW} "
            "iterations): lower optim.learning_rate, raise loss.kl (e.g. 0.01) or use more videos "
            "per group; the best checkpoint is kept, see `flashgrpo export`",
        )

    def _term_falls(self) -> Sign | None:
        total = self.reward.values
        if len(total) < 2 * WINDOW or step(total[:WINDOW], total[-WINDOW:]) < CLEAR:
            return None
        for label, series in self.terms.items():
            weight = self.weights.get(label)
            if weight is None or len(series.values) < 2 * WINDOW:
                continue
            first, recent = series.values[:WINDOW], series.values[-WINDOW:]
            worse = -step(first, recent) * (-1.0 if weight < 0 else 1.0)
            if worse > CLEAR:
                return Sign(
                    "reward_hacking",
                    f"the reward rises but its term `{label}` gets worse ({mean(first):.4g} to "
                    f"{mean(recent):.4g}): the policy may exploit the other terms; look at the "
                    f"videos, raise the weight of `{label}`, raise loss.kl or stop earlier",
                )
        return None

    def _held_out_falls(self) -> Sign | None:
        held = self.held_out
        if len(held.values) < 2:
            return None
        best = max(range(len(held.values)), key=held.values.__getitem__)
        then = self.reward.before(held.iterations[best])
        recent = self.reward.before(held.iterations[-1])
        if (
            len(recent) < WINDOW
            or held.values[best] - held.values[-1] <= self.half_width.values[-1]
        ):
            return None
        # Before the first iteration there is no training reward: the first window stands for it.
        if step(then if len(then) == WINDOW else self.reward.values[:WINDOW], recent) < CLEAR:
            return None
        return Sign(
            "reward_hacking",
            f"the training reward rises but the held-out reward fell from {held.values[best]:.4g} "
            f"(iteration {held.iterations[best]}) to {held.values[-1]:.4g}: the policy overfits or "
            "exploits the reward; stop here or set eval.patience, use more prompts, add a second "
            "reward term or raise loss.kl",
        )

    def _kl_high(self) -> Sign | None:
        recent = self.kl.values[-IN_A_ROW:]
        if len(recent) < IN_A_ROW or min(recent) <= KL_LIMIT:
            return None
        return Sign(
            "kl_high",
            f"the policy is far from its reference: KL {recent[-1]:.3g} per element, above "
            f"{KL_LIMIT:g}: raise loss.kl or lower optim.learning_rate",
        )

    def _clip_high(self) -> Sign | None:
        recent = self.clipped.values[-IN_A_ROW:]
        if len(recent) < IN_A_ROW or min(recent) <= CLIP_LIMIT:
            return None
        return Sign(
            "clip_high",
            f"the clip range cuts {recent[-1]:.0%} of the videos, so most of an update is lost: "
            "lower optim.learning_rate or optim.updates_per_rollout, or raise loss.clip",
        )

    def _gradient_grows(self) -> Sign | None:
        earlier, recent = self.gradient.values[:-IN_A_ROW], self.gradient.values[-IN_A_ROW:]
        if len(earlier) < WINDOW:
            return None
        usual = median(earlier[-2 * WINDOW :])
        if usual <= 0 or min(recent) <= GRADIENT_GROWTH * usual:
            return None
        return Sign(
            "gradient_grows",
            f"the gradient norm rose from {usual:.3g} to {recent[-1]:.3g}: lower "
            "optim.learning_rate or optim.max_grad_norm",
        )

    def _little_signal(self) -> Sign | None:
        recent = self.idle.values[-WINDOW:]
        if len(recent) < WINDOW or min(recent) <= 0.5:
            return None
        return Sign(
            "little_signal",
            f"in {mean(recent):.0%} of the groups all videos have the same reward, so they teach "
            "nothing: use a finer reward, larger groups, or prompts that are not solved yet",
        )


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def step(first: list[float], second: list[float]) -> float:
    """Difference of two means in standard deviations of their single values."""
    squares = sum((v - mean(part)) ** 2 for part in (first, second) for v in part)
    scatter = math.sqrt(squares / (len(first) + len(second) - 2))
    # Rounding must not turn equal numbers into a clear difference.
    floor = 1e-6 * max(abs(mean(first)), abs(mean(second)), 1e-30)
    return (mean(second) - mean(first)) / max(scatter, floor)
