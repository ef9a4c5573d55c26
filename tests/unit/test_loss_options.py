"""GRPO-Guard's ratio and Flow-DPPO's mask: against float64 computations written down here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.loss import policy_loss, rectification_weights
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.sde import log_prob, sde_transition, step_divergence, transition_mean
from flashgrpo_core.update import sampled_mean
from tests.unit._tiny import (  # noqa: F401
    one_thread,
    perturb,
    sample_all,
    tiny_groups,
    tiny_policy,
    tiny_sampler,
)
from tests.unit._train import advantages_for, norm, relative_difference, update

SCHEDULE = make_schedule("unipc-a", 20, 3.0)
SHAPE = (3, 2, 1, 3, 4)


def step_of(k: int, change: float, kind: str = "flash", eta: float = 1.0):
    """A transition, its noise, both velocities and what `policy_loss` takes, float64."""
    rng = torch.Generator().manual_seed(k)
    x, old, eps, direction = (
        torch.randn(SHAPE, dtype=torch.float64, generator=rng) for _ in "abcd"
    )
    new = (old + change * direction).requires_grad_()
    step = sde_transition(SCHEDULE, k, kind, eta)
    old_mean = transition_mean(step, x, old)
    x_next = old_mean + step.noise_std * eps
    mean = transition_mean(step, x, new)
    terms = (
        log_prob(step, x_next, mean),
        log_prob(step, x_next, old_mean),
        step_divergence(step, mean, old_mean),
    )
    return step, eps, new, mean - old_mean, terms


@pytest.mark.parametrize(
    ("kind", "eta"), [("flash", 1.0), ("flow", 0.7), ("dance", 0.3), ("cps", 0.7)]
)
@pytest.mark.parametrize("k", [0, 5, 12])
def test_the_normalised_ratio_is_the_mean_of_noise_times_shift(
    kind: str, eta: float, k: int
) -> None:
    """exp((dlogp + D) s) = exp(mean eps dmu): for all kinds, at every step, with its gradient."""
    step, eps, new, shift, (log_new, log_old, change) = step_of(k, 0.2, kind, eta)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loss, ratio, _ = policy_loss(
        log_new, log_old, advantages, 1.7, 0.9, change=change, guard=step.noise_std
    )
    wanted = torch.exp((eps * shift.detach()).flatten(1).mean(1))
    torch.testing.assert_close(ratio, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss.detach(), -1.7 * advantages * wanted, rtol=1e-12, atol=0)
    loss.sum().backward()
    scale = (-1.7 * advantages * wanted).view(-1, 1, 1, 1, 1) * step.a_v / math.prod(SHAPE[1:])
    torch.testing.assert_close(new.grad, scale * eps, rtol=1e-10, atol=1e-15)


def test_the_normalised_ratio_has_no_drift() -> None:
    """Over the noise log r has mean 0, where the plain log ratio has mean -D."""
    plain, guarded = [], []
    rng = torch.Generator().manual_seed(1)
    step = sde_transition(SCHEDULE, 5)
    old = torch.randn((1, 400), dtype=torch.float64, generator=rng)
    mean = old + 0.3 * step.noise_std * torch.randn((1, 400), dtype=torch.float64, generator=rng)
    change = step_divergence(step, mean, old)
    for _ in range(2000):
        x_next = old + step.noise_std * torch.randn((1, 400), dtype=torch.float64, generator=rng)
        new, before = log_prob(step, x_next, mean), log_prob(step, x_next, old)
        one = torch.ones(1, dtype=torch.float64)
        plain.append(math.log(policy_loss(new, before, one, 1.0, 0.9)[1].item()))
        options = {"change": change, "guard": step.noise_std}
        guarded.append(math.log(policy_loss(new, before, one, 1.0, 0.9, **options)[1].item()))
    error = np.std(plain) / math.sqrt(len(plain))
    assert abs(np.mean(plain) + change.item()) < 4 * error and change.item() > 20 * error
    assert abs(np.mean(guarded)) < 4 * np.std(guarded) / math.sqrt(len(guarded))


@pytest.mark.parametrize("kind", ["flash", "flow"])
def test_guard_balances_the_steps(kind: str) -> None:
    """w |d log r / d v| per unit of noise: 1/|dt| leaves 1 + std^2 (1 - sigma) / (2 sigma)."""
    steps = list(range(10))
    weights = rectification_weights(
        steps, SCHEDULE, (0, 10), kind=kind, eta=0.7, ratio="guard", normaliser="pool"
    )
    inverse = 1 / -SCHEDULE.dt[:10]
    np.testing.assert_allclose(weights, inverse / inverse.mean(), rtol=1e-14)
    sizes = [
        w * abs(sde_transition(SCHEDULE, k, kind, 0.7).a_v)
        for k, w in zip(steps, weights, strict=True)
    ]
    bare = [abs(sde_transition(SCHEDULE, k, kind, 0.7).a_v) for k in steps]
    assert max(sizes) / min(sizes) < 1.4 < max(bare) / min(bare)
    update_mean = rectification_weights(
        [0, 9], SCHEDULE, (0, 10), ratio="guard", normaliser="update"
    )
    np.testing.assert_allclose(update_mean, inverse[[0, 9]] / inverse[[0, 9]].mean(), rtol=1e-14)
    assert rectification_weights(
        [0, 9], SCHEDULE, (0, 10), ratio="guard", normaliser="none"
    ).tolist() == [1, 1]


@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize("log_ratio", [-0.2, -1e-6, 0.0, 1e-6, 0.2])
@pytest.mark.parametrize("change", [0.0, 0.9e-5, 1.1e-5, 1.0])
def test_the_mask_cuts_exactly_where_stated(
    advantage: float, log_ratio: float, change: float
) -> None:
    """Above the threshold, and only in the direction of the advantage; no clip at any ratio."""
    old = torch.tensor([0.3], dtype=torch.float64)
    new = (old + log_ratio).requires_grad_()
    loss, ratio, cut = policy_loss(
        new,
        old,
        torch.tensor([advantage], dtype=torch.float64),
        2.0,
        1e-3,
        change=torch.tensor([change], dtype=torch.float64),
        threshold=1e-5,
    )
    loss.sum().backward()
    gone = change > 1e-5 and (log_ratio > 0 if advantage > 0 else log_ratio < 0)
    wanted = 0.0 if gone else -2.0 * advantage * math.exp(log_ratio)
    assert bool(cut) == gone
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert new.grad.item() == pytest.approx(wanted, rel=1e-12)
    assert ratio.item() == pytest.approx(math.exp(log_ratio), rel=1e-12)


def test_the_divergence_is_that_of_the_gaussians() -> None:
    """Against torch.distributions, summed and divided by the number of elements."""
    step, _, _, shift, (_, _, change) = step_of(3, 0.1)
    zero = torch.zeros_like(shift)
    std = torch.full_like(shift, step.noise_std)
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(normal(shift, std), normal(zero, std))
    torch.testing.assert_close(change, wanted.flatten(1).mean(1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize(
    "options", [{"ratio": "guard", "clip": 2e-6}, {"mask": "kl"}, {"ratio": "guard", "mask": "kl"}]
)
def test_options_of_an_update(noise: str, options: dict) -> None:
    """On policy they cut nothing and D is 0; after a change they cut, each by its own rule."""
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy, micro_batch=3)
    groups = tiny_groups(3, noise=noise)
    rollouts, advantages = sample_all(sampler, groups), advantages_for(groups)
    for rollout in rollouts:
        step = sampler.transition(rollout.group)
        with torch.no_grad():
            mean = transition_mean(
                step, rollout.latents, sampler.velocity(rollout.group, rollout.latents)
            )
        old = sampled_mean(step, rollout)
        assert float((mean - old).abs().max()) < 2e-6
    sampler.forget()
    first, stats = update(sampler, groups, rollouts, advantages, **options)
    assert stats.clip_fraction == 0.0 and stats.ratio_drift < 1e-7 and norm(first) > 0
    plain, _ = update(sampler, groups, rollouts, advantages)
    if "ratio" not in options:
        assert relative_difference(first, plain) < 1e-6
    perturb(policy, 0.05, seed=9)
    cut, shares = [], []
    for rollout in rollouts:
        step, row = sampler.transition(rollout.group), groups.index(rollout.group)
        with torch.no_grad():
            mean = transition_mean(
                step, rollout.latents, sampler.velocity(rollout.group, rollout.latents)
            )
        eps = (rollout.latents_next - sampled_mean(step, rollout)).double() / step.noise_std
        shift = (mean - sampled_mean(step, rollout)).double()
        change = (shift / step.noise_std).square().flatten(1).mean(1).numpy() / 2
        guard = (eps * shift).flatten(1).mean(1).numpy()
        log_ratio = guard if "ratio" in options else guard / step.noise_std - change
        a = advantages[row, rollout.samples.start : rollout.samples.stop]
        limit = 0.0 if "mask" in options else 2e-6
        away = (a > 0) & (log_ratio > limit) | (a < 0) & (log_ratio < -limit)
        cut += list(away & (change > 1e-5) if "mask" in options else away)
        shares.append(change.max())
    sampler.forget()
    _, stats = update(sampler, groups, rollouts, advantages, **options)
    assert max(shares) > 1e-5 and 0 < np.mean(cut) < 1
    assert stats.clip_fraction == np.mean(cut)


def test_mistakes_are_named() -> None:
    one = torch.ones(1)
    with pytest.raises(FlashGRPOError, match="need the step's divergence"):
        policy_loss(one, one, one, 1.0, 1e-3, threshold=1e-5)
    with pytest.raises(FlashGRPOError, match="ratio 'log' is unknown: choose one of plain, guard"):
        rectification_weights([1], SCHEDULE, (0, 10), ratio="log")
