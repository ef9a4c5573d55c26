"""Group-relative advantages.

A_i = clamp((r_i - mean of the group) / (std + 1e-4)), with a choice of std. Several reward terms
are standardised one by one before they are weighted, so that no term decides by its scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .errors import FlashGRPOError

ADVANTAGE_STDS = ("update", "group", "max_group", "none", "raw_update")

#: Largest share of an update's videos that may be masked.
MAX_MASKED = 0.1

_DELTA = 1e-4

#: What is left of a frozen variance after an iteration.
_KEPT = 0.9


@dataclass(frozen=True)
class Advantages:
    """Advantages of one update.

    Attributes:
        values: float64 `[P, G]`, 0 where unused.
        used: bool `[P, G]`, samples that enter the loss.
        zero_variance: bool `[P]`, groups whose rewards were all equal (skipped).
        too_few: bool `[P]`, groups with fewer than two valid samples (skipped).
        std: mean divisor over groups, of the weighted reward.
        stds: this update's own std of each reward term, or of their sum (`""`) when that is what is
            standardised; empty when the std differs between groups.
    """

    values: np.ndarray
    used: np.ndarray
    zero_variance: np.ndarray
    too_few: np.ndarray
    std: float
    stds: dict[str, float] = field(default_factory=dict)

    @property
    def no_signal(self) -> bool:
        """True when no sample of the update can teach anything."""
        return not bool(self.used.any())


def compute_advantages(
    terms: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    valid: np.ndarray | None = None,
    *,
    std: str = "update",
    clamp: float = 5.0,
    normalise: bool = True,
    frozen: Mapping[str, float] | None = None,
) -> Advantages:
    """Advantages of all groups of an update.

    Args:
        terms: raw reward per term, each float64 `[P, G]`.
        weights: weight per term; with `normalise` they act between terms only, since the sum is
            divided by the sum of their absolute values.
        valid: bool `[P, G]`, False for masked samples; None means all.
        std: `update` (group-centred rewards of the whole update), `group`, `max_group` (largest
            group std), `none` (1), `raw_update` (raw rewards of the whole update; the paper's
            reference code). All are unbiased estimates.
        clamp: largest absolute advantage.
        normalise: standardise each term on its own and add them weighted; otherwise standardise
            the weighted sum.
        frozen: std of each term from past iterations (`Advantages.stds`), used in place of this
            update's: the divisor then does not depend on the rewards that it divides. Terms that
            are missing have no past yet and use this update's.

    Raises:
        FlashGRPOError: no term, or an unknown `std`.
    """
    if not terms:
        raise FlashGRPOError("no reward term: add at least one entry to reward.terms")
    if std not in ADVANTAGE_STDS:
        raise FlashGRPOError(
            f"advantage std {std!r} is unknown: choose one of {', '.join(ADVANTAGE_STDS)}"
        )
    arrays = {name: np.asarray(value, dtype=np.float64) for name, value in terms.items()}
    shape = next(iter(arrays.values())).shape
    valid = np.ones(shape, bool) if valid is None else np.asarray(valid, bool)
    total = weighted_sum({n: np.where(valid, v, 0.0) for n, v in arrays.items()}, weights)

    too_few = valid.sum(1) < 2
    flat = np.ones(shape[0], bool)
    for name, value in arrays.items():
        if weights[name] != 0:
            flat &= ~_varies(value, valid)
    if not normalise:
        flat = ~_varies(total, valid)
    zero_variance = flat & ~too_few
    used = valid & ~(too_few | flat)[:, None]

    _, divisor_total = _standardise(total, valid, std)
    parts, scale = {"": (total, 1.0)}, 1.0
    if normalise:
        parts = {name: (value, weights[name]) for name, value in arrays.items()}
        scale = sum(abs(weights[name]) for name in arrays) or 1.0
    values, stds = np.zeros(shape), {}
    for name, (value, weight) in parts.items():
        centred, divisor = _standardise(value, valid, std)
        if std not in ("group", "none"):
            stds[name] = float(divisor[0, 0]) - _DELTA
        if frozen and name in frozen:
            divisor = np.full_like(divisor, frozen[name] + _DELTA)
        values += weight / scale * centred / divisor
    values = np.where(used, np.clip(values, -clamp, clamp), 0.0)
    return Advantages(values, used, zero_variance, too_few, float(divisor_total.mean()), stds)


def faded_stds(past: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Root of the faded mean of variances, iteration by iteration; the first is taken as it is.

    An update whose rewards were all alike says nothing about their scale and is left out.
    """
    found = dict(past)
    for name, std in now.items():
        if std > 0:
            before = past.get(name, std)
            found[name] = math.sqrt(_KEPT * before**2 + (1 - _KEPT) * std**2)
    return found


def check_masked(valid: np.ndarray, least: int = 2) -> None:
    """Refuse to go on with what too many failed scores have left over.

    Args:
        valid: bool `[P, G]`, False where the score of a video failed.
        least: scored videos that each group must keep.

    Raises:
        FlashGRPOError: more than `MAX_MASKED` of the videos are masked, or a group has too few.
    """
    masked, count = int((~valid).sum()), valid.size
    fix = (
        "the log names the reward and the reason; start its server again or fix the reward, then "
        "resume"
    )
    if masked > MAX_MASKED * count:
        raise FlashGRPOError(
            f"{masked} of {count} videos have no score, at most {MAX_MASKED:.0%} may be left out: "
            f"{fix}"
        )
    left = valid.sum(1)
    if count and left.min() < least:
        raise FlashGRPOError(
            f"group {int(left.argmin()) + 1} has {int(left.min())} scored videos left of "
            f"{valid.shape[1]}, it needs {least}: {fix}"
        )


def weighted_sum(terms: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Sum over terms of weight times value; all terms have one shape."""
    return np.sum([weights[name] * value for name, value in terms.items()], axis=0)


def _varies(value: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Whether each group's valid values differ by more than rounding, bool `[P]`."""
    high = np.where(valid, value, -np.inf).max(1)
    low = np.where(valid, value, np.inf).min(1)
    size = np.where(valid, np.abs(value), 0.0).max(1)
    return (high - low) > 1e-9 * np.maximum(size, 1e-300)


def _standardise(value: np.ndarray, valid: np.ndarray, std: str) -> tuple[np.ndarray, np.ndarray]:
    """Group-centred values `[P, G]` (0 where invalid) and the divisor `[P, 1]`."""
    value = np.where(valid, value, 0.0)
    count = valid.sum(1, keepdims=True)
    mean = value.sum(1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(valid, value - mean, 0.0)
    # Unbiased: every group spends one degree of freedom on its own mean.
    group_std = np.sqrt((centred**2).sum(1, keepdims=True) / np.maximum(count - 1, 1))
    enough = count[:, 0] >= 2
    if std == "none":
        return centred, np.ones_like(group_std)
    if std == "group":
        divisor = group_std
    elif std == "max_group":
        divisor = np.full_like(group_std, group_std[enough].max() if enough.any() else 0.0)
    elif std == "update":
        freedom = max(int((count[enough] - 1).sum()), 1)
        divisor = np.full_like(group_std, np.sqrt((centred[enough] ** 2).sum() / freedom))
    else:
        raw = value[valid]
        divisor = np.full_like(group_std, raw.std(ddof=1) if raw.size > 1 else 0.0)
    return centred, divisor + _DELTA
