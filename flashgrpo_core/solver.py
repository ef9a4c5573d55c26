"""A second-order sampler for the deterministic steps after the stochastic one.

The trained transition is fixed once the stochastic step is taken; what follows only finishes the
video for the reward. A multistep solver gets there with fewer forwards than the Euler steps of the
schedule. The videos, and so the rewards, are then those of another discretisation: an approximate
reward, an unchanged policy gradient.

DPM-Solver++ 2M (https://arxiv.org/abs/2211.01095) for the flow `x = (1 - sigma) x0 + sigma eps`,
in the data prediction `x0 = x - sigma v`. With `lambda = log((1 - sigma) / sigma)` and step sizes
`h`, `h_prev` in lambda:

    D  = x0 + (x0 - x0_prev) h / (2 h_prev)
    x' = (sigma' / sigma) x + (1 - sigma') (1 - exp(-h)) D
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from .errors import FlashGRPOError


def suffix_steps(remaining: int, share: float) -> int:
    """Steps that are taken instead of `remaining` ones: the share of them, rounded up."""
    return math.ceil(share * remaining - 1e-9)


def suffix_sigmas(sigmas: np.ndarray, first: int, share: float) -> np.ndarray:
    """Noise levels of a shortened suffix.

    Even in log-SNR from `sigmas[first]` to the schedule's last level above 0, then 0: jumping to 0
    from a higher level than the schedule does would cost more than all other steps save.

    Args:
        sigmas: `[N + 1]`, the schedule, last entry 0.
        first: index the suffix starts at, 1 to N.
        share: share of the remaining steps that is taken, rounded up, above 0 and at most 1; with
            1 the levels are the schedule's own.

    Returns:
        float64 `[m + 1]` from `sigmas[first]` to 0.

    Raises:
        FlashGRPOError: the share is out of range.
    """
    if not 0.0 < share <= 1.0:
        raise FlashGRPOError(f"suffix share {share} is outside 0 to 1: use 1 for all steps")
    suffix = np.asarray(sigmas[first:], np.float64)
    remaining = len(suffix) - 1
    steps = suffix_steps(remaining, share)
    if steps == remaining:
        return suffix
    if steps == 1:
        return suffix[[0, -1]]
    snr = np.log((1 - suffix[:-1]) / suffix[:-1])
    levels = 1 / (1 + np.exp(np.linspace(snr[0], snr[-1], steps)))
    levels[[0, -1]] = suffix[[0, -2]]  # exact ends
    return np.append(levels, 0.0)


@torch.no_grad()
def multistep(
    velocity: Callable[[torch.Tensor, float], torch.Tensor],
    latents: torch.Tensor,
    sigmas: np.ndarray,
) -> torch.Tensor:
    """Integrate the ODE from `sigmas[0]` to `sigmas[-1]` with one velocity per step.

    The first step and the one to sigma 0 are of first order, the others of second.

    Args:
        velocity: (latents, sigma) -> velocity, both `[B, C, T, H, W]` float32.
        latents: at noise level `sigmas[0]`.
        sigmas: decreasing noise levels below 1 (the first may be 1, the last 0).
    """
    previous: torch.Tensor | None = None
    previous_h = 0.0
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        sigma, following = float(sigma), float(following)
        clean = latents - sigma * velocity(latents, sigma)
        if following == 0.0:
            return clean
        if sigma >= 1.0:  # lambda is minus infinity here: a plain Euler step
            latents = (1 - following) * clean + following * (latents - (1 - sigma) * clean) / sigma
            previous = None
            continue
        h = _log_snr(following) - _log_snr(sigma)
        target = clean
        if previous is not None:
            target = clean + (clean - previous) * (h / (2 * previous_h))
        latents = (following / sigma) * latents + (1 - following) * -math.expm1(-h) * target
        previous, previous_h = clean, h
    return latents


def _log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)
