"""Which steps are trained: the strategies Flash-GRPO is compared with."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flashgrpo_core.config import LossConfig
from flashgrpo_core.distributed import World
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.forwards import rollout_forwards
from flashgrpo_core.rollout import sample_shares
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.sde import log_prob, transition_mean
from flashgrpo_core.strategies import possible_steps, stochastic_steps
from flashgrpo_core.update import policy_gradient, update_units
from tests.unit._tiny import SHAPE, sample_all, tiny_groups, tiny_policy, tiny_sampler

STEPS = 6
WINDOW = (0, 5)
SETUPS = [
    ("flash", "shared"),
    ("flash", "independent"),
    ("full", "shared"),
    ("full", "independent"),
]
SETUPS += [("window", "shared"), ("window", "independent"), ("mixed", "shared")]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(moved=0.1)


def groups_of(strategy: str, noise: str = "shared", **options):
    groups = tiny_groups(3, window=WINDOW, noise=noise)
    return stochastic_steps(groups, strategy, WINDOW, run_seed=5, **options)


def setup(policy, strategy: str, noise: str, micro_batch: int = 4):
    sampler = tiny_sampler(policy, make_schedule("simple", STEPS, 3.0), micro_batch=micro_batch)
    groups = groups_of(strategy, noise)
    return sampler, groups, sample_all(sampler, groups)


def gradient(policy, sampler, groups, rollouts, **loss):
    advantages = np.random.default_rng(0).normal(size=(len(groups), groups[0].size))
    used = np.ones(advantages.shape, bool)
    used[1, 2] = False
    units = update_units(sampler, groups, rollouts, used, World())
    got = policy_gradient(
        policy, sampler, groups, units, advantages, used, LossConfig(**loss), WINDOW
    )
    sampler.forget()
    return *got, advantages, used


def test_steps_of_each_strategy() -> None:
    assert [g.steps_of(0) for g in groups_of("full")] == [(0, 1, 2, 3, 4)] * 3
    start = groups_of("window", train_steps=2, place="start")
    assert {g.steps_of(i) for g in start for i in range(g.size)} == {(0, 1)}
    seen = [
        groups_of("window", train_steps=2, place="progressive", every=4, iteration=i)[0].steps_of(0)
        for i in (1, 4, 5, 9, 13, 99)
    ]
    assert seen == [(0, 1), (0, 1), (1, 2), (2, 3), (3, 4), (3, 4)]
    random = {groups_of("window", train_steps=2, iteration=i)[0].steps_of(0) for i in range(40)}
    assert random == set(possible_steps("window", WINDOW, 2, "random"))
    mixed = groups_of("mixed")
    own = [g.steps_of(i) for g in mixed for i in range(g.size)]
    assert {len(steps) for steps in own} == {1} and len(set(own)) > 2
    assert not any(g.same_steps for g in mixed)
    assert all(g.same_steps for s in ("flash", "full", "window") for g in groups_of(s))


@pytest.mark.parametrize(("strategy", "noise"), SETUPS)
def test_forwards_equal_the_formula(policy, strategy: str, noise: str) -> None:
    sampler, groups, _ = setup(policy, strategy, noise)
    calls = []
    hook = policy.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    try:
        rollouts = sample_all(sampler, groups)
        assert sum(calls) == rollout_forwards(groups, sampler.schedule, sampler.settings)
        calls.clear()
        _, stats, _, used = gradient(policy, sampler, groups, rollouts)
        assert sum(calls) == stats.forwards
    finally:
        hook.remove()
    size, trained = groups[0].size, {"flash": 1, "mixed": 1, "window": 2, "full": 5}[strategy]
    shared = noise == "shared" and strategy != "mixed"
    # Micro-batches of which no video is used: only where a video may be alone in one.
    alone = range(2, 3) in [s for g, s in sample_shares(groups, 4) if g == 1]
    masked = 1 if strategy == "mixed" and alone else 0
    assert stats.forwards == 3 * ((trained - 1) * size + (1 if shared else size)) - masked


@pytest.mark.parametrize(("strategy", "noise"), SETUPS)
def test_every_transition_is_recorded_and_on_policy(policy, strategy: str, noise: str) -> None:
    """Each record's log-probability is that of its own step, and the ratio before an update is 1."""
    sampler, groups, rollouts = setup(policy, strategy, noise)
    for rollout in rollouts:
        group = next(g for g in groups if g.group_id == rollout.group.group_id)
        records = [rollout, *rollout.later]
        assert tuple(r.group.sde_step for r in records) == group.steps_of(rollout.samples.start)
        for record in records:
            step = sampler.transition(record.group)
            with torch.no_grad():
                velocity = sampler.velocity(record.group, record.latents)
            mean = transition_mean(step, record.latents, velocity)
            new = log_prob(step, record.latents_next, mean)
            assert torch.allclose(new, record.old_log_prob, atol=2e-6)
            noise_used = (record.latents_next - mean) / step.noise_std
            assert float(noise_used.std()) == pytest.approx(1.0, abs=0.1)
        for before, after in zip(records, records[1:], strict=False):
            if after.group.sde_step == before.group.sde_step + 1:
                assert torch.equal(before.latents_next, after.latents)
    sampler.forget()
    _, stats, _, _ = gradient(policy, sampler, groups, rollouts)
    assert stats.ratio_drift <= 2e-6
    assert sorted(stats.by_step) == sorted(
        {k for g in groups for i in range(g.size) for k in g.steps_of(i)}
    )


@pytest.mark.parametrize(("strategy", "noise"), SETUPS)
def test_the_gradient_is_the_mean_over_transitions(policy, strategy: str, noise: str) -> None:
    """Against autograd of the plain sum -A log p / n over all recorded transitions, weights 1."""
    sampler, groups, rollouts = setup(policy, strategy, noise, micro_batch=3)
    got, _, advantages, used = gradient(
        policy, sampler, groups, rollouts, rectification="none", clip=1.0
    )
    rows = {g.group_id: row for row, g in enumerate(groups)}
    total, count = 0.0, 0
    for rollout in rollouts:
        row = rows[rollout.group.group_id]
        for record in (rollout, *rollout.later):
            step = sampler.transition(record.group)
            n = len(record.samples)
            latents = record.latents.expand(n, *SHAPE)
            mean = transition_mean(step, latents, sampler.velocity(record.group, latents))
            new = log_prob(step, record.latents_next, mean)
            for i, sample in enumerate(record.samples):
                if used[row, sample]:
                    total = total - advantages[row, sample] * new[i]
                    count += 1
    (total / count).backward()
    norm = sum(float(g.square().sum()) for g in got.values()) ** 0.5
    difference = 0.0
    for name, parameter in policy.parameters().items():
        difference += float((got[name] - parameter.grad).square().sum())
        parameter.grad = None
    assert norm > 0
    assert difference**0.5 <= 1e-4 * norm


def test_flash_is_untouched_and_mistakes_are_named() -> None:
    groups = tiny_groups(3, window=WINDOW)
    assert stochastic_steps(groups, "flash", WINDOW) == groups
    assert groups[0].at(groups[0].sde_step) == groups[0]
    assert dataclasses.replace(groups[0], sample_steps=((1,), (2,), (1,), (2,))).same_steps is False
    with pytest.raises(FlashGRPOError, match="schedule.strategy 'all' is unknown"):
        stochastic_steps(groups, "all", WINDOW)
    with pytest.raises(FlashGRPOError, match=r"train_steps = 6 does not fit the window \[0, 5\)"):
        groups_of("window", train_steps=6)
    with pytest.raises(FlashGRPOError, match="schedule.place 'end' is unknown"):
        groups_of("window", place="end")
