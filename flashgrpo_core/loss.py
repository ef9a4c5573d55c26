"""The clipped policy-gradient loss of one SDE step, temporally rectified.

    r = exp(log p_new - log p_old)
    loss = max(-w A r, -w A clip(r, 1 - c, 1 + c))        per sample

w is 1/lambda of the step divided by a normaliser (temporal gradient rectification, arXiv
2605.15980): without it the steps with little noise dominate only because d log p / d v is large
there. w multiplies outside the clip, so the ratio itself is not rectified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .errors import FlashGRPOError
from .schedule import Schedule, as_windows
from .sde import inverse_gradient_scales

RECTIFICATIONS = ("pool", "update", "none")
RATIOS = ("plain", "guard")
MASKS = ("clip", "kl")


def rectification_weights(
    steps: Sequence[int],
    schedule: Schedule,
    window: tuple[int, int],
    *,
    kind: str = "flash",
    eta: float = 1.0,
    normaliser: str = "pool",
    counts: Sequence[int] | None = None,
    ratio: str = "plain",
) -> np.ndarray:
    """Loss weight w of each group from the step it actually took, float64 `[P]`.

    Args:
        steps: SDE step per group.
        schedule: the rollout's schedule.
        window: the eligible steps.
        kind: SDE kind.
        eta: SDE noise scale.
        normaliser: `pool` divides by the mean of 1/lambda over the window (constant over the run),
            `update` by the mean over the samples of this update (the reference code), `none`
            gives weights of 1, i.e. no rectification.
        counts: samples per group that enter the loss, for `update`; None means equal.
        ratio: with `guard` 1/|dt| stands in place of 1/lambda.

    Raises:
        FlashGRPOError: unknown normaliser or ratio, or a step outside the window.
    """
    if normaliser not in RECTIFICATIONS:
        raise FlashGRPOError(
            f"rectification {normaliser!r} is unknown: choose one of {', '.join(RECTIFICATIONS)}"
        )
    if ratio not in RATIOS:
        raise FlashGRPOError(f"ratio {ratio!r} is unknown: choose one of {', '.join(RATIOS)}")
    outside = [k for k in steps if not window[0] <= k < window[1]]
    if outside:
        raise FlashGRPOError(
            f"SDE step {outside[0]} is outside the window [{window[0]}, {window[1]})"
        )
    if normaliser == "none":
        return np.ones(len(steps))
    if ratio == "guard":
        pool = -1.0 / schedule.dt[window[0] : window[1]]
    else:
        pool = inverse_gradient_scales(schedule, window, kind, eta)
    inverse = np.array([pool[k - window[0]] for k in steps])
    if normaliser == "pool":
        return inverse / pool.mean()
    share = np.ones(len(steps)) if counts is None else np.asarray(counts, np.float64)
    return inverse / np.average(inverse, weights=share if share.any() else None)


def window_weights(
    steps: Sequence[int],
    schedule: Schedule,
    windows: tuple[int, int] | Sequence[tuple[int, int]],
    *,
    kind: str = "flash",
    eta: float = 1.0,
    normaliser: str = "pool",
    counts: Sequence[int] | None = None,
    ratio: str = "plain",
) -> np.ndarray:
    """`rectification_weights` with the normaliser of each group's own window.

    Experts have a window each, and their losses differ in size by an order of magnitude: a common
    normaliser would leave one of them almost no weight.

    Raises:
        FlashGRPOError: see `rectification_weights`.
    """
    pairs = as_windows(windows)
    options: dict[str, Any] = {"kind": kind, "eta": eta, "normaliser": normaliser, "ratio": ratio}
    if len(pairs) == 1:
        return rectification_weights(steps, schedule, pairs[0], counts=counts, **options)
    weights = np.zeros(len(steps))
    left = set(range(len(steps)))
    for window in pairs:
        rows = [row for row in sorted(left) if window[0] <= steps[row] < window[1]]
        left -= set(rows)
        if rows:
            share = None if counts is None else [counts[row] for row in rows]
            own = [steps[row] for row in rows]
            weights[rows] = rectification_weights(own, schedule, window, counts=share, **options)
    if left:
        raise FlashGRPOError(f"SDE step {steps[min(left)]} is in no window of {list(pairs)}")
    return weights


def policy_loss(
    new_log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    weight: float,
    clip: float,
    *,
    change: torch.Tensor | None = None,
    guard: float = 0.0,
    threshold: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clipped or masked loss per sample.

    Args:
        new_log_prob: `[B]`, with gradient.
        old_log_prob: `[B]`, recorded at rollout.
        advantages: `[B]`.
        weight: rectification weight w > 0 of the step.
        clip: clip range c of the ratio.
        change: `[B]`, with gradient: the exact KL divergence D of the step from the sampling policy,
            see `sde.step_divergence`; needed by the two options below.
        guard: noise std s of the step for the normalised ratio of GRPO-Guard; 0 for the plain one.
        threshold: largest D of the KL mask, which then stands in place of the clip; 0 clips.

    Returns:
        Loss `[B]`, ratio `[B]` (no gradient), and whether clip or mask cut the gradient, bool `[B]`.

    Raises:
        FlashGRPOError: `change` is missing although it is needed.
    """
    log_ratio = new_log_prob - old_log_prob
    if change is None and (guard or threshold):
        raise FlashGRPOError("the normalised ratio and the KL mask need the step's divergence")
    if guard and change is not None:
        log_ratio = (log_ratio + change) * guard
    ratio = torch.exp(log_ratio)
    if threshold and change is not None:
        further = (advantages > 0) & (ratio > 1) | (advantages < 0) & (ratio < 1)
        cut = further & (change > threshold)
        loss = torch.where(cut, 0.0, -weight * advantages * ratio)
        return loss, ratio.detach(), cut.detach()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = weight * torch.maximum(-advantages * ratio, -advantages * clipped)
    cut = ((advantages > 0) & (ratio > 1 + clip)) | ((advantages < 0) & (ratio < 1 - clip))
    return loss, ratio.detach(), cut.detach()
