"""What holds for every sampler's stochastic step: autograd, noise 0, KL, bits, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.schedule import SCHEDULES, make_schedule
from flashgrpo_core.sde import (
    SDE_KINDS,
    diffusion_coefficient,
    inverse_gradient_scales,
    kl_divergence,
    log_prob,
    ode_transition,
    sde_transition,
    transition_mean,
)

ALL = [(kind, eta) for kind, eta in zip(SDE_KINDS, (1.0, 0.7, 0.3, 0.7), strict=True)]


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("kind", "eta"), ALL)
@pytest.mark.parametrize("grid", SCHEDULES)
def test_gradient_of_log_prob_is_minus_lambda_eps_over_d(grid: str, kind: str, eta: float) -> None:
    schedule = make_schedule(grid, 12, 3.0)
    shape = (3, 2, 2, 3, 4)
    elements = math.prod(shape[1:])
    for k in range(11):
        step = sde_transition(schedule, k, kind, eta)
        x, v, eps = draw(shape, 1), draw(shape, 2).requires_grad_(), draw(shape, 3)
        mean = transition_mean(step, x, v)
        action = mean.detach() + step.noise_std * eps
        (gradient,) = torch.autograd.grad(log_prob(step, action, mean).sum(), v)
        torch.testing.assert_close(
            gradient, -step.gradient_scale * eps / elements, rtol=1e-9, atol=1e-12
        )
        # Finite differences of the value agree with autograd.
        direction, h = draw(shape, 4), 1e-6
        with torch.no_grad():
            up, down = (
                log_prob(step, action, transition_mean(step, x, v + sign * h * direction))
                for sign in (1, -1)
            )
        slope = (gradient * direction).flatten(1).sum(1)
        torch.testing.assert_close((up - down) / (2 * h), slope, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", SDE_KINDS)
@pytest.mark.parametrize("grid", SCHEDULES)
def test_noise_level_zero_is_the_ode_step_bit_for_bit(grid: str, kind: str) -> None:
    x, v = draw((2, 4, 3, 3, 3), 1).float(), draw((2, 4, 3, 3, 3), 2).float()
    schedule = make_schedule(grid, 9, 3.0)
    for k in range(9):
        noisy, plain = sde_transition(schedule, k, kind, 0.0), ode_transition(schedule, k)
        assert noisy.noise_std == 0.0
        assert (noisy.a_x, noisy.a_v) == (plain.a_x, plain.a_v) == (1.0, plain.dt)
        assert torch.equal(transition_mean(noisy, x, v), transition_mean(plain, x, v))
        assert torch.equal(transition_mean(plain, x, v), x + v * plain.dt)


@pytest.mark.parametrize("kind", ["flash", "flow", "dance"])
def test_the_three_forms_of_the_mean_agree(kind: str) -> None:
    schedule = make_schedule("simple", 10, 3.0)
    x, v = draw((2, 30), 1), draw((2, 30), 2)
    for k in range(10):
        step, std = (
            sde_transition(schedule, k, kind, 0.6),
            diffusion_coefficient(schedule, k, kind, 0.6),
        )
        sigma, dt = step.sigma, step.dt
        noise_hat, x0_hat = x + (1 - sigma) * v, x - sigma * v
        drift = x + (v + std**2 / (2 * sigma) * noise_hat) * dt
        mixed = (1 - step.sigma_next) * x0_hat + (
            step.sigma_next - std**2 * -dt / (2 * sigma)
        ) * noise_hat
        mean = transition_mean(step, x, v)
        torch.testing.assert_close(mean, drift, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(mean, mixed, rtol=1e-13, atol=1e-13)


def test_cps_keeps_the_noise_level() -> None:
    """A perfect velocity leaves latents at exactly the next noise level in variance."""
    schedule = make_schedule("simple", 10, 3.0)
    for k in range(9):
        step = sde_transition(schedule, k, "cps", 0.7)
        # x = (1 - sigma) x0 + sigma n, v = n - x0: factors of x0 and n in the mean.
        of_x0 = step.a_x * (1 - step.sigma) - step.a_v
        of_noise = step.a_x * step.sigma + step.a_v
        assert of_x0 == pytest.approx(1 - step.sigma_next, abs=1e-14)
        assert of_noise**2 + step.noise_std**2 == pytest.approx(step.sigma_next**2, rel=1e-12)


@pytest.mark.parametrize(("kind", "eta"), ALL)
def test_kl_is_half_lambda_squared_times_the_velocity_difference(kind: str, eta: float) -> None:
    schedule = make_schedule("simple", 10, 3.0)
    shape = (3, 4, 2, 3, 3)
    x, v, reference = draw(shape, 1), draw(shape, 2), draw(shape, 3)
    for k in (0, 4, 8):
        step = sde_transition(schedule, k, kind, eta)
        difference = transition_mean(step, x, v) - transition_mean(step, x, reference)
        from_means = difference.square().flatten(1).mean(1) / (2 * step.noise_std**2)
        identity = 0.5 * step.gradient_scale**2 * (v - reference).square().flatten(1).mean(1)
        kl = kl_divergence(step, v, reference)
        assert kl.shape == (3,)
        torch.testing.assert_close(kl, from_means, rtol=1e-10, atol=0)
        torch.testing.assert_close(kl, identity, rtol=1e-12, atol=0)


def test_kl_gives_no_gradient_to_the_reference() -> None:
    step = sde_transition(make_schedule("simple", 10, 3.0), 2)
    v, reference = draw((2, 5), 1).requires_grad_(), draw((2, 5), 2).requires_grad_()
    kl_divergence(step, v, reference).sum().backward()
    assert reference.grad is None and v.grad.abs().min() > 0


def test_log_prob_is_a_mean_of_gaussian_log_densities() -> None:
    step = sde_transition(make_schedule("simple", 10, 3.0), 2)
    mean, action = draw((3, 2, 4, 1, 2), 1), draw((3, 2, 4, 1, 2), 2)
    density = torch.distributions.Normal(mean, step.noise_std).log_prob(action)
    torch.testing.assert_close(log_prob(step, action, mean), density.flatten(1).mean(1))


def test_log_prob_has_no_gradient_through_the_action() -> None:
    """The action is what was done: a gradient through it would cancel the policy's."""
    step = sde_transition(make_schedule("simple", 10, 3.0), 2)
    mean, action = draw((2, 5), 1).requires_grad_(), draw((2, 5), 2).requires_grad_()
    log_prob(step, action, mean).sum().backward()
    assert action.grad is None and mean.grad.abs().min() > 0


def test_one_mean_serves_a_whole_group() -> None:
    step = sde_transition(make_schedule("simple", 10, 3.0), 2)
    shared, actions = draw((1, 3, 2, 4, 4), 1).requires_grad_(), draw((5, 3, 2, 4, 4), 2)
    together = log_prob(step, actions, shared)
    assert together.shape == (5,)
    apart = torch.cat([log_prob(step, actions[i : i + 1], shared) for i in range(5)])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=0)
    (a,) = torch.autograd.grad(together.sum(), shared)
    (b,) = torch.autograd.grad(apart.sum(), shared)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_log_prob_of_a_sample_does_not_depend_on_its_batch() -> None:
    """Bit for bit: with several threads a single long row is summed in another order than two.

    Another process may recompute a sample in another batch, and both must agree.
    """
    step = sde_transition(make_schedule("simple", 10, 3.0), 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        mean, actions = draw((6, 70_000), 1).float(), draw((6, 70_000), 2).float()
        together = log_prob(step, actions, mean)
        for cut in (1, 2, 4):
            apart = torch.cat(
                [log_prob(step, actions[i : i + cut], mean[i : i + cut]) for i in range(0, 6, cut)]
            )
            assert torch.equal(together, apart), f"batches of {cut}"
    finally:
        torch.set_num_threads(threads)


def test_injected_noise_of_the_flash_sampler_is_nearly_flat() -> None:
    schedule = make_schedule("unipc-a", 20, 3.0)
    s = [sde_transition(schedule, k).noise_std for k in range(10)]
    assert 0.128 < min(s) and max(s) < 0.147


def test_weights_fall_over_the_pool() -> None:
    for kind, eta in (("flash", 1.0), ("dance", 0.3), ("cps", 0.7), ("flow", 0.7)):
        inverse = inverse_gradient_scales(make_schedule("simple", 20, 3.0), (0, 10), kind, eta)
        assert (np.diff(inverse) < 0).all(), kind


@pytest.mark.parametrize("step", [-1, 10, 99])
def test_a_step_outside_the_schedule_is_named(step: int) -> None:
    with pytest.raises(FlashGRPOError, match=rf"SDE step {step} .* 0 to 9"):
        sde_transition(make_schedule("simple", 10, 3.0), step)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(FlashGRPOError, match="'ddim' .* flash, flow, dance, cps"):
        sde_transition(make_schedule("simple", 10, 3.0), 2, "ddim")


@pytest.mark.parametrize("eta", [-0.1, 10.5, math.inf, math.nan])
def test_a_noise_scale_out_of_range_is_named(eta: float) -> None:
    with pytest.raises(FlashGRPOError, match=rf"eta = {eta} is outside"):
        sde_transition(make_schedule("simple", 10, 3.0), 2, "flash", eta)


@pytest.mark.parametrize("kind", SDE_KINDS)
def test_a_step_without_noise_has_no_gradient_scale(kind: str) -> None:
    """Noise level 0 can be sampled but not trained, and cps has no noise in the last step."""
    schedule = make_schedule("simple", 10, 3.0)
    with pytest.raises(FlashGRPOError, match="noise"):
        inverse_gradient_scales(schedule, (0, 5), kind, 0.0)
    with pytest.raises(FlashGRPOError, match="noise"):
        inverse_gradient_scales(schedule, (5, 10), "cps", 0.7)
