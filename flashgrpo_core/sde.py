"""One stochastic denoising step: mean, noise, log-probability and gradient scale.

Every sampler here is linear in the latents and the velocity,

    mean = a_x * x + a_v * v,      x' = mean + s * eps,      eps ~ N(0, 1),

so a step is four numbers. With the notation of the Flash-GRPO paper (arXiv 2605.15980; its t is
our sigma) and dt = sigma' - sigma < 0, the Flash, Flow-SDE and Dance samplers share

    a_x = 1 + std^2 / (2 sigma) dt,   a_v = (1 + std^2 (1 - sigma) / (2 sigma)) dt,   s = std sqrt(-dt)

and differ in the diffusion coefficient std; CPS (arXiv 2509.05952) keeps the noise level exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from .errors import FlashGRPOError
from .schedule import Schedule

SDE_KINDS = ("flash", "flow", "dance", "cps")

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Transition:
    """The scalars of one step, float64.

    Attributes:
        sigma: noise level before the step.
        sigma_next: noise level after it.
        a_x: factor of the latents in the mean.
        a_v: factor of the velocity in the mean; equals dt for the ODE.
        noise_std: s, standard deviation of the injected noise; 0 for the ODE.
    """

    sigma: float
    sigma_next: float
    a_x: float
    a_v: float
    noise_std: float

    @property
    def dt(self) -> float:
        """`sigma_next - sigma`, negative."""
        return self.sigma_next - self.sigma

    @property
    def gradient_scale(self) -> float:
        """Lambda = |d mean / d v| / s: size of d log p / d v per unit of noise (paper, TGR).

        For the Flash sampler this is sqrt(-dt)/std + std sqrt(-dt) (1 - sigma) / (2 sigma).

        Raises:
            FlashGRPOError: the step is deterministic.
        """
        if self.noise_std == 0:
            raise FlashGRPOError(
                f"the step from sigma {self.sigma:.4g} to {self.sigma_next:.4g} has noise 0, so there "
                "is nothing to train there: set schedule.eta above 0 (flash 1.0, flow 0.7, dance 0.3, "
                "cps 0.7) and keep the last step out of schedule.window"
            )
        return abs(self.a_v) / self.noise_std


def ode_transition(schedule: Schedule, step: int) -> Transition:
    """The deterministic Euler step x + v dt."""
    sigma, sigma_next = float(schedule.sigmas[step]), float(schedule.sigmas[step + 1])
    return Transition(sigma, sigma_next, 1.0, sigma_next - sigma, 0.0)


def sde_transition(
    schedule: Schedule, step: int, kind: str = "flash", eta: float = 1.0
) -> Transition:
    """The stochastic version of step `step`.

    Args:
        schedule: the sampler's noise levels.
        step: index in 0..N-1. For `cps` not the last step, whose noise is zero by construction.
        kind: `flash` (std = eta * sigma_1 * sigma, the paper's reference code), `flow`
            (eta * sqrt(sigma / (1 - sigma)), Flow-GRPO), `dance` (eta, DanceGRPO) or `cps`.
        eta: noise scale; 0 gives the ODE step exactly.

    Raises:
        FlashGRPOError: unknown kind or step outside the schedule.
    """
    if not 0 <= step < schedule.steps:
        raise FlashGRPOError(f"SDE step {step} is outside the schedule's 0 to {schedule.steps - 1}")
    if not 0 <= eta <= 10:
        raise FlashGRPOError(f"SDE noise scale eta = {eta} is outside 0 to 10: use e.g. 1.0")
    sigma, sigma_next = float(schedule.sigmas[step]), float(schedule.sigmas[step + 1])
    dt = sigma_next - sigma
    if kind == "cps":
        s = sigma_next * math.sin(eta * math.pi / 2)
        # sigma' - sqrt(sigma'^2 - s^2), written so that s = 0 leaves the Euler step bit for bit.
        root = math.sqrt(max(sigma_next**2 - s**2, 0.0))
        lost = s**2 / (sigma_next + root) if s else 0.0
        return Transition(sigma, sigma_next, 1.0 - lost, dt - (1 - sigma) * lost, abs(s))
    std = diffusion_coefficient(schedule, step, kind, eta)
    drift = std**2 / (2 * sigma)
    return Transition(
        sigma, sigma_next, 1.0 + drift * dt, (1.0 + drift * (1 - sigma)) * dt, std * math.sqrt(-dt)
    )


def diffusion_coefficient(schedule: Schedule, step: int, kind: str, eta: float) -> float:
    """Std of the SDE before the sqrt(-dt) factor.

    Raises:
        FlashGRPOError: unknown kind.
    """
    sigma, sigma_1 = float(schedule.sigmas[step]), float(schedule.sigmas[1])
    if kind == "flash":
        return eta * sigma_1 * sigma
    if kind == "flow":
        # sqrt(sigma / (1 - sigma)) diverges at sigma = 1; a first sigma just below 1 slips past
        # the usual test for equality, so every sigma above the second one is held there.
        held = min(sigma, sigma_1)
        return eta * math.sqrt(held / (1 - held))
    if kind == "dance":
        return eta
    raise FlashGRPOError(f"SDE kind {kind!r} is unknown: choose one of {', '.join(SDE_KINDS)}")


def transition_mean(step: Transition, x: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    """Mean of the step, same shape as `x` `[B, C, T, H, W]`; float32 at least."""
    return step.a_x * x + step.a_v * velocity


def log_prob(step: Transition, x_next: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Gaussian log-probability of `x_next`, averaged over all but the batch dimension.

    log p = mean_d [ -(x' - mu)^2 / (2 s^2) - ln s - ln(2 pi) / 2 ]

    The mean (not the sum) keeps the ratio near 1; clip range, clip norm and Adam's epsilon are
    calibrated to it. Gradients flow through `mean` only. Each sample is summed on its own, because
    the order of a sum over a whole batch depends on the batch: the same sample gets the same bits
    in any batch and on any process.

    Args:
        step: a transition with noise.
        x_next: stored latents after the step `[B, ...]`, no gradient.
        mean: mean of the step `[B or 1, ...]`.

    Returns:
        `[B]` in the dtype of `mean`.
    """
    s = step.noise_std
    difference = x_next.detach() - mean
    squared = torch.stack([row.square().mean() for row in difference])
    return -squared / (2 * s * s) - math.log(s) - _HALF_LOG_2PI


def kl_divergence(
    step: Transition, velocity: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """KL between the step under two velocities, mean over dimensions, `[B]`.

    (mu - mu_ref)^2 / (2 s^2) = lambda^2 / 2 * (v - v_ref)^2, since both share x and s.
    """
    squared = (velocity - reference.detach()).square().flatten(1).mean(1)
    return 0.5 * step.gradient_scale**2 * squared


def step_divergence(step: Transition, mean: torch.Tensor, old_mean: torch.Tensor) -> torch.Tensor:
    """Exact KL divergence between the step under two means, mean over elements, `[B]`.

    (mu - mu_old)^2 / (2 s^2), since both have the same variance s^2.

    Args:
        step: a transition with noise.
        mean: mean under the policy, `[B or 1, ...]`, with gradient.
        old_mean: mean under the policy that sampled, `[B, ...]`.
    """
    squared = torch.stack([row.square().mean() for row in mean - old_mean.detach()])
    return squared / (2 * step.noise_std**2)


def inverse_gradient_scales(
    schedule: Schedule, window: tuple[int, int], kind: str = "flash", eta: float = 1.0
) -> np.ndarray:
    """1 / lambda of every step of the half-open window, float64 `[K]`."""
    steps = range(window[0], window[1])
    return np.array([1.0 / sde_transition(schedule, k, kind, eta).gradient_scale for k in steps])
