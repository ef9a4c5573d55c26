"""Every strategy with every SDE kind: recorded steps are those of the formulas, and on policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.seeds import normal
from flashgrpo_core.strategies import STRATEGIES, step_seed, stochastic_steps
from tests.unit._tiny import (  # noqa: F401
    SHAPE,
    one_thread,
    sample_all,
    tiny_groups,
    tiny_policy,
    tiny_sampler,
)
from tests.unit._train import WINDOW, advantages_for, norm, update

KINDS = {"flash": 1.0, "flow": 0.7, "dance": 0.3, "cps": 0.7}


def step_by_hand(kind: str, eta: float, sigmas: np.ndarray, k: int, x, v):
    """Mean and standard deviation of step k, float64, from the published formulas."""
    sigma, after, second = float(sigmas[k]), float(sigmas[k + 1]), float(sigmas[1])
    if kind == "cps":
        s = after * math.sin(eta * math.pi / 2)
        clean, noise = x - sigma * v, x + (1 - sigma) * v
        return (1 - after) * clean + math.sqrt(after**2 - s**2) * noise, s
    held = min(sigma, second)  # sqrt(sigma / (1 - sigma)) has no value at the first sigma, 1
    std = {
        "flash": eta * second * sigma,
        "flow": eta * math.sqrt(held / (1 - held)),
        "dance": eta,
    }[kind]
    dt = after - sigma
    score = -(x + (1 - sigma) * v) / sigma
    return x + (v - std**2 / 2 * score) * dt, std * math.sqrt(-dt)


@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_with_every_kind(strategy: str, kind: str, noise: str) -> None:
    policy = tiny_policy(moved=0.1)
    schedule = make_schedule("simple", 4, 3.0)
    assert schedule.sigmas[0] == 1.0  # where the flow kind's own formula divides by zero
    sampler = tiny_sampler(policy, schedule, kind=kind, eta=KINDS[kind])
    groups = stochastic_steps(
        tiny_groups(2, size=3, noise=noise), strategy, WINDOW, train_steps=2, place="start"
    )
    rollouts = sample_all(sampler, groups)
    seen = set()
    for rollout in rollouts:
        for record in (rollout, *rollout.later):
            k = record.group.sde_step
            seen.add(k)
            with torch.no_grad():
                v = sampler.velocity(record.group, record.latents).double()
            mean, s = step_by_hand(
                kind, KINDS[kind], schedule.sigmas, k, record.latents.double(), v
            )
            for row, i in enumerate(record.samples):
                eps = normal(SHAPE, step_seed(record.group, i, k)).double()
                action = record.latents_next[row].double()
                mu = mean[row if len(mean) > 1 else 0]
                assert float((action - mu - s * eps).abs().max()) < 1e-5 * max(1.0, s)
                density = torch.distributions.Normal(mu, s).log_prob(action).mean()
                # (x' - mu)^2 / (2 s^2) in float32: rounding of mu counts in units of s.
                assert record.old_log_prob[row].item() == pytest.approx(density.item(), abs=2e-5)
            assert torch.isfinite(record.latents_next).all()
    wanted = {"full": {0, 1, 2}, "window": {0, 1}}
    assert seen == wanted.get(strategy, seen)
    sampler.forget()
    gradient, stats = update(sampler, groups, rollouts, advantages_for(groups))
    assert stats.ratio_drift < 2e-6 and stats.clip_fraction == 0.0
    assert 0 < norm(gradient) < math.inf
