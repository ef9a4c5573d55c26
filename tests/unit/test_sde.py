"""The stochastic step: printed values, reference vectors, 50-digit arithmetic and autograd."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from mpmath import mp, mpf

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.loss import rectification_weights
from flashgrpo_core.schedule import SCHEDULES, Schedule, make_schedule
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
from tests.unit._digits import assert_digits

VECTORS = json.loads(
    (Path(__file__).parents[1] / "data" / "reference_vectors.json").read_text(encoding="utf-8")
)
GRIDS = {"A": "unipc-a", "B": "unipc-b"}


# Printed values.


def test_whole_trajectory_of_the_reference_schedule() -> None:
    schedule = make_schedule("unipc-a", 20, 3.0)
    inverse = inverse_gradient_scales(schedule, (0, 20))
    assert_digits(
        inverse,
        "7.4770 7.0414 6.6112 6.1867 5.7682 5.3559 4.9502 4.5513 4.1596 3.7754 "
        "3.3989 3.0304 2.6702 2.3184 1.9748 1.6393 1.3110 .9883 .6678 .3431",
    )
    steps = [sde_transition(schedule, k) for k in range(20)]
    assert_digits(
        [step.gradient_scale for step in steps],
        ".1337 .1420 .1513 .1616 .1734 .1867 .2020 .2197 .2404 .2649 "
        ".2942 .3300 .3745 .4313 .5064 .6100 .7628 1.0119 1.4973 2.9143",
    )
    assert_digits(
        [step.noise_std for step in steps],
        ".1290 .1312 .1334 .1356 .1377 .1398 .1417 .1434 .1448 .1458 "
        ".1463 .1461 .1449 .1424 .1380 .1312 .1208 .1053 .0827 .0494",
    )


@pytest.mark.parametrize(
    ("kind", "steps", "shift", "printed", "pool_mean"),
    [
        (
            "unipc-a", 20, 3.0,
            "7.4770 7.0414 6.6112 6.1867 5.7682 5.3559 4.9502 4.5513 4.1596 3.7754", "5.587689",
        ),
        (
            "simple", 20, 3.0,
            "7.4845 7.0483 6.6177 6.1927 5.7737 5.3610 4.9548 4.5555 4.1634 3.7787", "5.593015",
        ),
        (
            "unipc-b", 20, 3.0,
            "7.4887 7.0526 6.6221 6.1973 5.7785 5.3659 4.9599 4.5607 4.1687 3.7842", "5.597842",
        ),
        (
            "unipc-a", 20, 5.0,
            "9.6881 9.1496 8.6138 8.0812 7.5521 7.0267 6.5054 5.9888 5.4774 4.9717", "7.305477",
        ),
        ("unipc-a", 12, 3.0, "5.6538 5.1051 4.5682 4.0441 3.5339 3.0386", "4.323961"),
        ("unipc-a", 12, 5.0, "7.3438 6.6583 5.9795 5.3085 4.6468 3.9960", "5.655480"),
        ("unipc-a", 12, 8.0, "9.3215 8.4723 7.6269 6.7864 5.9518 5.1250", "7.213980"),
        ("unipc-a", 16, 3.0, "6.6283 6.1457 5.6707 5.2038 4.7455 4.2962 3.8566 3.4272", "4.996735"),
        ("unipc-a", 10, 3.0, "5.0974 4.5039 3.9260 3.3653 2.8235", "3.943250"),
        (
            "simple", 20, 5.0,
            "9.6959 9.1569 8.6207 8.0877 7.5580 7.0322 6.5105 5.9935 5.4816 4.9755", "7.311250",
        ),
        (
            "simple", 20, 8.0,
            "12.2885 11.6246 10.9622 10.3017 9.6431 8.9868 8.3331 7.6824 7.0352 6.3920", "9.324965",
        ),
        ("simple", 10, 3.0, "5.1025 4.5084 3.9298 3.3684 2.8260", "3.947029"),
    ],
)  # fmt: skip
def test_inverse_gradient_scales(
    kind: str, steps: int, shift: float, printed: str, pool_mean: str
) -> None:
    inverse = inverse_gradient_scales(make_schedule(kind, steps, shift), (0, steps // 2))
    assert inverse.dtype == np.float64
    assert_digits(inverse, printed)
    assert_digits([inverse.mean()], pool_mean)


def test_first_value_of_fifty_steps() -> None:
    inverse = inverse_gradient_scales(make_schedule("unipc-a", 50, 5.0), (0, 1))
    assert_digits(inverse, "15.6081")


def test_weights_follow_the_actual_sigmas() -> None:
    """Grid A with sigma_0 put to 1 must show in the first value: nothing comes from a table."""
    a = make_schedule("unipc-a", 20, 3.0)
    changed = Schedule(a.kind, a.shift, np.append(1.0, a.sigmas[1:]), a.timesteps)
    inverse = inverse_gradient_scales(changed, (0, 10))
    assert_digits(inverse, "7.4094 7.0414 6.6112 6.1867 5.7682 5.3559 4.9502 4.5513 4.1596 3.7754")


@pytest.mark.parametrize(
    ("step", "std", "dt", "s", "mean", "x_next", "log_p", "slope"),
    [
        (0, ".982092", "-.017247", ".128976", ".501015", ".591298", ".884193", "-.093621"),
        (5, ".883824", "-.025005", ".139758", ".502400", ".600231", ".803907", "-.130697"),
        (9, ".771533", "-.035715", ".145808", ".504818", ".606884", ".761527", "-.185412"),
        (19, ".133844", "-.136240", ".049403", ".538714", ".573296", "1.843808", "-2.040034"),
    ],
)
def test_scalar_fixture(
    step: int, std: str, dt: str, s: str, mean: str, x_next: str, log_p: str, slope: str
) -> None:
    """x = .5, v = -.3, eps = .7 on 20 steps, shift 3."""
    schedule = make_schedule("unipc-a", 20, 3.0)
    transition = sde_transition(schedule, step)
    x = torch.full((1, 1), 0.5, dtype=torch.float64)
    v = torch.full((1, 1), -0.3, dtype=torch.float64, requires_grad=True)
    mu = transition_mean(transition, x, v)
    action = (mu + transition.noise_std * 0.7).detach()
    value = log_prob(transition, action, mu)
    value.sum().backward()
    assert_digits([diffusion_coefficient(schedule, step, "flash", 1.0)], std)
    assert_digits([transition.dt, transition.noise_std], f"{dt} {s}")
    assert_digits([mu.item(), action.item(), value.item()], f"{mean} {x_next} {log_p}")
    assert_digits([v.grad.item()], slope)


# Other samplers at 20 steps, shift 3, first ten.


def test_flow_sde_on_the_reference_grid_is_guarded_at_the_first_step() -> None:
    """sigma_0 = .99967 is not 1, so a guard for equality would let 1/lambda explode to 234.4."""
    schedule = make_schedule("unipc-a", 20, 3.0)
    inverse = inverse_gradient_scales(schedule, (0, 10), "flow", 0.7)
    assert_digits(inverse[1:], "30.9 20.6 15.8 12.8 10.6 9.01 7.70 6.61 5.69")
    sigma, sigma_1 = mpf(schedule.sigmas[0]), mpf(schedule.sigmas[1])

    def independent(held: mpf) -> float:
        std, q = mpf("0.7") * mp.sqrt(held / (1 - held)), mp.sqrt(sigma - sigma_1)
        return float(1 / (q / std + std * q * (1 - sigma) / (2 * sigma)))

    assert_digits([independent(sigma)], "234.4")
    np.testing.assert_allclose(inverse[0], independent(sigma_1), rtol=1e-12)
    assert inverse[0] < 42


def test_flow_sde_on_comfyui_s_grid() -> None:
    inverse = inverse_gradient_scales(make_schedule("simple", 20, 3.0), (0, 10), "flow", 0.7)
    assert_digits(inverse, "40.25 31.23 20.74 15.86 12.82 10.67 9.024 7.708 6.619 5.697")


def test_dance() -> None:
    inverse = inverse_gradient_scales(make_schedule("unipc-a", 20, 3.0), (0, 10), "dance", 0.3)
    assert_digits(inverse, "2.284 2.205 2.126 2.047 1.967 1.888 1.808 1.728 1.648 1.568")


def test_cps() -> None:
    inverse = inverse_gradient_scales(make_schedule("unipc-a", 20, 3.0), (0, 10), "cps", 0.7)
    assert_digits(inverse, "50.2 31.0 21.9 16.6 13.1 10.7 8.86 7.45 6.33 5.40")


# The reference code's own numbers (float32).


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: f"{c['grid']}-{c['step']}")
def test_reference_vectors(case: dict) -> None:
    schedule = make_schedule(GRIDS[case["grid"]], case["steps"], case["shift"])
    step = sde_transition(schedule, case["step"])

    def tensor(name: str) -> torch.Tensor:
        return torch.tensor(case[name], dtype=torch.float32).reshape(case["shape"])

    np.testing.assert_allclose(
        [step.sigma, step.sigma_next, schedule.sigmas[1]],
        [case["sigma"], case["sigma_next"], case["sigma_1"]],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        [diffusion_coefficient(schedule, case["step"], "flash", 1.0), math.sqrt(-step.dt)],
        [case["std"], case["sqrt_minus_dt"]],
        rtol=1e-5,
    )
    np.testing.assert_allclose(1 / step.gradient_scale, case["inverse_lambda"], rtol=1e-5)

    x, velocity = tensor("x"), tensor("velocity").requires_grad_()
    mean = transition_mean(step, x, velocity)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, tensor("mean"), rtol=1e-5, atol=1e-5)
    # log p is judged at the recorded mean: the action minus another one is a small difference.
    torch.testing.assert_close(
        log_prob(step, tensor("x_next"), tensor("mean")),
        torch.tensor(case["log_prob"]),
        rtol=1e-5,
        atol=1e-5,
    )
    value = log_prob(step, tensor("x_next"), mean)
    torch.testing.assert_close(value, torch.tensor(case["log_prob"]), rtol=1e-5, atol=1e-5)
    value.sum().backward()
    torch.testing.assert_close(velocity.grad, tensor("dlogprob_dvelocity"), rtol=1e-5, atol=1e-5)
    ode = transition_mean(ode_transition(schedule, case["step"]), x, velocity)
    torch.testing.assert_close(ode, tensor("ode_next"), rtol=1e-5, atol=1e-5)


def test_there_are_nine_reference_transitions() -> None:
    assert len(VECTORS["cases"]) == 9


# Random schedules against 50 digits.


def mp_sigmas(kind: str, steps: int, shift: float) -> list[mpf]:
    """The schedule from the definition of its grid, in exact or 50-digit arithmetic."""
    s, sigmas = mpf(shift), []
    for i in range(steps):
        if kind == "simple":
            # The truncated index is defined by double arithmetic, which Fraction reproduces.
            index = int(float(i * Fraction(1000 / steps)))
            u = mpf(1000 - index) / 1000
        elif kind == "unipc-a":
            u = mpf(999) / 1000 * (1 - mpf(i) / steps)
        else:
            u = 1 - mpf(999) / 1000 * i / steps
        sigmas.append(s * u / (1 + (s - 1) * u))
    if kind == "unipc-b":
        sigmas[0] -= mpf(1) / 10**6
    return [*sigmas, mpf(0)]


def mp_step(sigmas: list[mpf], k: int, sde: str, eta: float) -> dict[str, mpf]:
    """Step scalars from the published definitions (std, or CPS's own mean)."""
    sigma, after, e = sigmas[k], sigmas[k + 1], mpf(eta)
    dt = after - sigma
    if sde == "cps":
        s = after * mp.sin(e * mp.pi / 2)
        keep = mp.sqrt(after**2 - s**2)
        # mean = (1 - sigma') (x - sigma v) + keep (x + (1 - sigma) v)
        a_x, a_v = (1 - after) + keep, -(1 - after) * sigma + (1 - sigma) * keep
        lam = abs(a_v) / s
    else:
        if sde == "flash":
            std = e * sigmas[1] * sigma
        elif sde == "dance":
            std = e
        else:
            held = sigmas[1] if sigma >= sigmas[1] else sigma
            std = e * mp.sqrt(held / (1 - held))
        q = mp.sqrt(-dt)
        s = std * q
        # x0 and noise read off x and v, recombined at the next level: Flow-GRPO's form.
        coefficient = after - std**2 * (-dt) / (2 * sigma)
        a_x = (1 - after) + coefficient
        a_v = -(1 - after) * sigma + coefficient * (1 - sigma)
        lam = q / std + std * q * (1 - sigma) / (2 * sigma)
    return {"sigma": sigma, "dt": dt, "s": s, "a_x": a_x, "a_v": a_v, "lambda": lam}


ETA = {"flash": (0.1, 2.0), "flow": (0.1, 1.5), "dance": (0.05, 1.0), "cps": (0.05, 0.95)}


@pytest.mark.parametrize("block", range(4))
def test_two_hundred_random_schedules(block: int) -> None:
    rng = random.Random(f"schedules {block}")
    with mp.workdps(50):
        for _ in range(50):
            kind, sde = rng.choice(SCHEDULES), rng.choice(SDE_KINDS)
            steps = rng.randint(3, 60)
            shift = rng.choice([1.0, 3.0, 5.0, 8.0, rng.uniform(0.5, 20.0)])
            eta = rng.uniform(*ETA[sde])
            first = rng.randint(0, steps - 3)
            window = (first, rng.randint(first + 2, steps - 1))
            label = f"{kind} {steps}/{shift} {sde} {eta} {window}"

            schedule = make_schedule(kind, steps, shift)
            sigmas = mp_sigmas(kind, steps, shift)
            exact = [mp_step(sigmas, k, sde, eta) for k in range(*window)]
            got = [sde_transition(schedule, k, sde, eta) for k in range(*window)]

            def close(ours: object, theirs: list[mpf], what: str, text: str = label) -> None:
                np.testing.assert_allclose(
                    np.asarray(ours, np.float64),
                    [float(v) for v in theirs],
                    rtol=1e-9,
                    atol=0,
                    err_msg=f"{what} of {text}",
                )

            close(schedule.sigmas, sigmas, "sigmas")
            close([t.sigma for t in got], [e["sigma"] for e in exact], "sigma")
            close([t.dt for t in got], [e["dt"] for e in exact], "dt")
            close([t.noise_std for t in got], [e["s"] for e in exact], "s")
            close([t.gradient_scale for t in got], [e["lambda"] for e in exact], "lambda")
            close([t.a_v for t in got], [e["a_v"] for e in exact], "a_v")
            # a_x may pass through zero: absolute.
            np.testing.assert_allclose(
                [t.a_x for t in got], [float(e["a_x"]) for e in exact], rtol=0, atol=1e-9
            )
            mean = mp.fsum(1 / e["lambda"] for e in exact) / len(exact)
            drawn = [rng.randrange(*window) for _ in range(5)]
            close(
                rectification_weights(drawn, schedule, window, kind=sde, eta=eta),
                [1 / exact[k - first]["lambda"] / mean for k in drawn],
                "weights",
            )
            counts = [rng.randint(0, 8) for _ in drawn]
            if any(counts):
                inverse = [1 / exact[k - first]["lambda"] for k in drawn]
                average = mp.fsum(c * v for c, v in zip(counts, inverse, strict=True)) / sum(counts)
                close(
                    rectification_weights(
                        drawn,
                        schedule,
                        window,
                        kind=sde,
                        eta=eta,
                        normaliser="update",
                        counts=counts,
                    ),
                    [v / average for v in inverse],
                    "update weights",
                )


# What holds for every sampler.

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


@pytest.mark.parametrize("kind", SDE_KINDS)
def test_a_step_without_noise_has_no_gradient_scale(kind: str) -> None:
    """Noise level 0 can be sampled but not trained, and cps has no noise in the last step."""
    schedule = make_schedule("simple", 10, 3.0)
    with pytest.raises(FlashGRPOError, match="noise"):
        inverse_gradient_scales(schedule, (0, 5), kind, 0.0)
    with pytest.raises(FlashGRPOError, match="noise"):
        inverse_gradient_scales(schedule, (5, 10), "cps", 0.7)
