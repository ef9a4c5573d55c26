"""Cheaper rollouts: what is exact stays exact, what is approximate leaves the trained step alone."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
import torch

from flashgrpo_core.config import LossConfig
from flashgrpo_core.control import Control
from flashgrpo_core.distributed import World
from flashgrpo_core.errors import Cancelled
from flashgrpo_core.forwards import rollout_forwards
from flashgrpo_core.groups import PromptGroup
from flashgrpo_core.kept import KeptGraphs
from flashgrpo_core.ode import sample_ode
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.rollout import Rollout, RolloutSampler, RolloutSettings, sample_shares
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.strategies import stochastic_steps
from flashgrpo_core.update import policy_gradient, update_units
from tests.unit._tiny import (  # noqa: F401
    SHAPE,
    embedding,
    one_thread,
    perturb,
    sample_all,
    tiny_groups,
    tiny_policy,
    tiny_sampler,
)
from tests.unit._train import WINDOW, Part, advantages_for, update

SCHEDULE = make_schedule("simple", 8, 3.0)


@pytest.fixture(scope="module")
def policy() -> WanPolicy:
    return tiny_policy(moved=0.1)


def sampler_with(policy: WanPolicy, guidance: float = 1.0, **settings: object) -> RolloutSampler:
    sampler = tiny_sampler(policy, SCHEDULE, guidance=guidance)
    sampler.settings = dataclasses.replace(sampler.settings, **settings)
    return sampler


class Calls:
    """Counts the transformer's calls, videos and full forwards while it is open."""

    def __init__(self, policy: WanPolicy) -> None:
        self.batches: list[int] = []
        self.full = 0
        self.policy = policy

    def __enter__(self) -> Calls:
        def call(module, args, kwargs) -> None:  # noqa: ANN001
            self.batches.append(len(kwargs["hidden_states"]))

        def full(module, args) -> None:  # noqa: ANN001
            self.full += 1

        transformer = self.policy.transformer
        self.handles = [
            transformer.register_forward_pre_hook(call, with_kwargs=True),
            transformer.blocks[-1].ffn.register_forward_pre_hook(full),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def same_transitions(got: list[Rollout], wanted: list[Rollout]) -> None:
    for left, right in zip(got, wanted, strict=True):
        for name in ("latents", "latents_next", "old_log_prob"):
            assert torch.equal(getattr(left, name), getattr(right, name)), name


# The graph of the trained step is kept.


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("noise", "guidance", "micro_batch", "kl"),
    [
        ("shared", 1.0, 2, 0.0),
        ("shared", 4.5, 4, 0.5),
        ("independent", 4.5, 3, 0.0),
        ("independent", 1.0, 1, 0.5),
    ],
)
def test_a_kept_graph_gives_the_bits_of_a_second_forward(
    checkpointing: bool, noise: str, guidance: float, micro_batch: int, kl: float
) -> None:
    policy = tiny_policy(moved=0.1, checkpointing=checkpointing)
    groups = tiny_groups(3, noise=noise)
    sampler = tiny_sampler(policy, guidance=guidance, micro_batch=micro_batch)
    wanted, plain = update(sampler, groups, sample_all(sampler, groups), kl=kl)
    sampler.kept = KeptGraphs(policy, 1.0)
    rollouts = sample_all(sampler, groups)
    assert all(r.velocity is not None and r.velocity.requires_grad for r in rollouts)
    with Calls(policy) as calls:
        got, stats = update(sampler, groups, rollouts, kl=kl)
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    assert stats.forwards == plain.forwards == stats.reused > 0 == plain.reused
    assert dataclasses.replace(stats, reused=0) == plain
    # Only the reference policy, and what checkpointing computes again block by block, is forward.
    assert sum(calls.batches) == (stats.forwards if kl else 0)


def test_every_transition_of_a_whole_trajectory_is_kept() -> None:
    policy = tiny_policy(moved=0.1)
    groups = stochastic_steps(tiny_groups(2), "full", WINDOW)
    sampler = tiny_sampler(policy)
    wanted, _ = update(sampler, groups, sample_all(sampler, groups))
    sampler.kept = KeptGraphs(policy, 1.0)
    got, stats = update(sampler, groups, sample_all(sampler, groups))
    assert stats.reused == stats.forwards
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)


def test_graphs_are_kept_up_to_the_limit_and_given_back() -> None:
    policy = tiny_policy(moved=0.1)
    groups, sampler = tiny_groups(3), tiny_sampler(policy)
    wanted, _ = update(sampler, groups, sample_all(sampler, groups))
    sampler.kept = KeptGraphs(policy, 1.0)
    rollouts = sample_all(sampler, groups)
    each = sampler.kept.bytes // 3
    # At least what the two blocks' attention and feed-forward keep of 8 tokens; no weights.
    assert 2 * 8 * 128 * 4 * 4 < each < 2 * 8 * 128 * 4 * 100
    update(sampler, groups, rollouts)
    del rollouts
    gc.collect()
    assert sampler.kept.bytes == 0
    for fit in (0, 1, 2):
        sampler.kept = KeptGraphs(policy, (fit + 0.5) * each / 2**30)
        rollouts = sample_all(sampler, groups)
        kept = [r.velocity is not None for r in rollouts]
        assert kept == [i < fit for i in range(3)]
        got, stats = update(sampler, groups, rollouts)
        assert stats.reused == fit
        assert all(torch.equal(got[n], wanted[n]) for n in wanted)


def test_a_later_update_of_the_same_rollouts_computes_again() -> None:
    groups, results = tiny_groups(2), []
    advantages, used = advantages_for(groups), np.ones((2, 4), bool)
    for gib in (0.0, 1.0):
        policy = tiny_policy(moved=0.1)
        sampler = tiny_sampler(policy)
        sampler.kept = KeptGraphs(policy, gib)
        units = update_units(sampler, groups, sample_all(sampler, groups), used, World())
        both = []
        for _ in range(2):
            loss = LossConfig(clip=1.0)
            both.append(
                policy_gradient(policy, sampler, groups, units, advantages, used, loss, WINDOW)
            )
            perturb(policy, 0.02, seed=9)
            sampler.forget()
        results.append(both)
    (plain, second), (kept, second_kept) = results
    assert kept[1].reused == 2 and second_kept[1].reused == 0
    assert second_kept[1].ratio_drift == second[1].ratio_drift > 0
    for got, wanted in ((kept[0], plain[0]), (second_kept[0], second[0])):
        assert all(torch.equal(got[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("noise", ["shared", "independent"])
def test_kept_graphs_of_two_ranks_add_up_to_the_single_process(noise: str) -> None:
    """A group that is cut between ranks is redrawn by one of them, which keeps that graph."""
    groups = tiny_groups(3, noise=noise)
    advantages, used = advantages_for(groups), np.ones((3, 4), bool)
    shares = sample_shares(groups, 2)

    def one(world: World, gib: float) -> tuple[dict[str, torch.Tensor], int, int]:
        policy = tiny_policy(moved=0.1)
        sampler = tiny_sampler(policy, micro_batch=2)
        sampler.kept = KeptGraphs(policy, gib)
        rollouts = [sampler.sample(groups[g], samples) for g, samples in world.deal(shares)]
        sampler.forget()
        units = update_units(sampler, groups, rollouts, used, world)
        gradient, stats = policy_gradient(
            policy, sampler, groups, units, advantages, used, LossConfig(), WINDOW, world=world
        )
        assert stats.ratio_drift == 0.0
        return gradient, stats.forwards, stats.reused

    wanted, forwards, reused = one(World(), 0.0)
    parts = [one(Part(rank, 2), 1.0) for rank in range(2)]
    for name, gradient in wanted.items():
        assert torch.equal(sum(part[0][name] for part in parts).float(), gradient.float())
    assert reused == 0 and sum(part[1] for part in parts) == forwards
    assert sum(part[2] for part in parts) == forwards


# Guidance.


@pytest.mark.parametrize("noise", ["shared", "independent"])
def test_batched_guidance_is_sequential_guidance(policy: WanPolicy, noise: str) -> None:
    groups = tiny_groups(2, noise=noise)
    results = []
    for how, factor in (("sequential", 1), ("batched", 2), ("auto", 2)):  # 2 x 8 tokens are few
        sampler = sampler_with(policy, 4.5, guidance_batched=how)
        with Calls(policy) as calls:
            rollouts = sample_all(sampler, groups)
        assert sum(calls.batches) == rollout_forwards(groups, SCHEDULE, sampler.settings)
        assert max(calls.batches) == 4 * factor
        gradient, stats = update(sampler, groups, rollouts)
        assert stats.ratio_drift == 0.0
        results.append((rollouts, gradient))
    for rollouts, _ in results[1:]:
        for got, wanted in zip(rollouts, results[0][0], strict=True):
            torch.testing.assert_close(got.final, wanted.final, rtol=0, atol=1e-4)
    same_transitions(results[1][0], results[2][0])


def test_automatic_batching_ends_at_its_limit() -> None:
    video = RolloutSettings((16, 21, 60, 104))  # 81x480x832: 32,760 tokens
    small = RolloutSettings((16, 3, 32, 32))  # 9x256x256: 768 tokens
    assert not video.batches(1)
    assert small.batches(2) and not small.batches(3)


def test_guidance_outside_the_interval_is_none_at_all(policy: WanPolicy) -> None:
    sigmas = SCHEDULE.sigmas
    interval = (float(sigmas[5]), float(sigmas[2]))  # steps 2 to 5
    groups = [
        dataclasses.replace(g, sde_step=k) for g, k in zip(tiny_groups(3), (0, 2, 6), strict=True)
    ]
    sampler = sampler_with(policy, 4.5, guidance_interval=interval)
    assert [sampler.guidance_of(g) for g in groups] == [1.0, 4.5, 1.0]
    with Calls(policy) as calls:
        rollouts = sample_all(sampler, groups)
    assert sum(calls.batches) == rollout_forwards(groups, SCHEDULE, sampler.settings)
    # 8 steps, 4 videos: the prefix with the SDE step once, the rest for each; guided steps twice.
    assert sum(calls.batches) == (1 + 4 * 11) + (4 + 4 * 8) + (11 + 4 * 1)
    for group, rollout in zip(groups, rollouts, strict=True):
        x = rollout.latents_next
        with torch.no_grad():
            for i in range(group.sde_step + 1, 8):
                scale = 4.5 if 2 <= i <= 5 else 1.0
                v = policy.velocity(
                    x,
                    float(SCHEDULE.timesteps[i]),
                    embedding(group.prompt),
                    sampler.negative,
                    scale,
                )
                x = x + v * float(SCHEDULE.dt[i])
        torch.testing.assert_close(rollout.final, x, rtol=0, atol=1e-4)
    _, stats = update(sampler, groups, rollouts, window=(0, 7))
    assert stats.ratio_drift == 0.0 and stats.forwards == 1 + 2 + 1


def test_plain_sampling_is_guided_everywhere(policy: WanPolicy) -> None:
    everywhere = sampler_with(policy, 4.5)
    within = sampler_with(policy, 4.5, guidance_interval=(0.4, 0.6))
    videos = [
        sample_ode(policy, (1, 2), SCHEDULE, s.settings, embedding("x"), s.negative)
        for s in (everywhere, within)
    ]
    assert torch.equal(*videos)


# Step caching.


def test_step_caching_skips_blocks_and_leaves_the_transition(policy: WanPolicy) -> None:
    groups = tiny_groups(3)
    plain = sample_all(sampler_with(policy), groups)
    full = []
    for threshold in (1e-9, 0.3, 10.0):
        sampler = sampler_with(policy, cache_threshold=threshold)
        with Calls(policy) as calls:
            cached = sample_all(sampler, groups)
        same_transitions(cached, plain)
        assert sum(calls.batches) == rollout_forwards(groups, SCHEDULE, sampler.settings)
        full.append(calls.full)
        equal = [torch.equal(a.final, b.final) for a, b in zip(cached, plain, strict=True)]
        assert all(equal) if threshold < 1e-6 else not any(equal)
        _, stats = update(sampler, groups, cached)
        assert stats.ratio_drift == 0.0
    prefixes = sum(g.sde_step + 1 for g in groups)
    assert full[0] == prefixes + sum(7 - g.sde_step for g in groups)
    assert full[0] > full[1] > full[2] == prefixes + len(groups)  # one full step for each suffix


@pytest.mark.parametrize("batched", ["batched", "sequential"])
def test_the_halves_of_guidance_have_a_cache_each(policy: WanPolicy, batched: str) -> None:
    """With an unreachable threshold the first step's residuals serve all others."""
    groups = tiny_groups(2)
    sampler = sampler_with(policy, 4.5, cache_threshold=10.0, guidance_batched=batched)
    finals = [r.final for r in sample_all(sampler, groups)]
    other = sampler_with(
        policy, 4.5, cache_threshold=10.0, guidance_batched="batched", suffix_share=1.0
    )
    for got, wanted in zip(finals, [r.final for r in sample_all(other, groups)], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_the_cache_starts_empty_for_each_micro_batch(policy: WanPolicy) -> None:
    sampler = sampler_with(policy, cache_threshold=0.3)
    groups = tiny_groups(3)
    first = sample_all(sampler, groups)
    again = sample_all(sampler, groups[::-1])[::-1]
    assert all(torch.equal(a.final, b.final) for a, b in zip(first, again, strict=True))


def test_an_interrupted_rollout_leaves_no_cache_behind(policy: WanPolicy) -> None:
    class Stop(Control):
        left = 6

        def check(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise Cancelled

    sampler, group = sampler_with(policy, cache_threshold=10.0), tiny_groups(2)[0]
    sampler.control = Stop()
    with pytest.raises(Cancelled):
        sampler.sample(group, range(2))
    assert not policy.transformer.is_cache_enabled
    clean = tiny_policy(moved=0.1)
    x = torch.randn(1, *SHAPE)
    with torch.no_grad():
        for timestep in (900.0, 890.0):
            assert torch.equal(
                policy.velocity(x, timestep, embedding("a")),
                clean.velocity(x, timestep, embedding("a")),
            )


# Everything at once.


@pytest.mark.parametrize("strategy", ["flash", "window", "mixed"])
def test_with_all_savings_the_counters_are_the_formula(strategy: str) -> None:
    policy = tiny_policy(moved=0.1)
    groups: list[PromptGroup] = stochastic_steps(tiny_groups(3), strategy, WINDOW)
    interval = (0.3, 0.93)
    plain = sampler_with(policy, 4.5, guidance_interval=interval, micro_batch=2)
    cheap = sampler_with(
        policy, 4.5, guidance_interval=interval, micro_batch=2, suffix_share=0.5,
        cache_threshold=0.2,
    )  # fmt: skip
    cheap.kept = KeptGraphs(policy, 1.0)
    with Calls(policy) as calls:
        rollouts = sample_all(cheap, groups)
    assert sum(calls.batches) == rollout_forwards(groups, SCHEDULE, cheap.settings)
    assert sum(calls.batches) < rollout_forwards(groups, SCHEDULE, plain.settings)
    wanted_rollouts = sample_all(plain, groups)
    same_transitions(rollouts, wanted_rollouts)
    got, stats = update(cheap, groups, rollouts)
    wanted, _ = update(plain, groups, wanted_rollouts)
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    assert stats.reused == stats.forwards and stats.ratio_drift == 0.0
