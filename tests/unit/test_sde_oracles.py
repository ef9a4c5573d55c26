"""The stochastic step against printed values, reference vectors and 50-digit arithmetic."""

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

from flashgrpo_core.loss import rectification_weights
from flashgrpo_core.schedule import SCHEDULES, Schedule, make_schedule
from flashgrpo_core.sde import (
    SDE_KINDS,
    diffusion_coefficient,
    inverse_gradient_scales,
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
