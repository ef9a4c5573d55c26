"""Rollouts: the ODE except at one step, from seeds alone, with and without a shared prefix."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashgrpo_core.control import Control
from flashgrpo_core.distributed import World
from flashgrpo_core.errors import Cancelled
from flashgrpo_core.forwards import rollout_forwards
from flashgrpo_core.groups import PromptGroup
from flashgrpo_core.ode import sample_ode
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.rollout import Rollout, RolloutSampler, RolloutSettings, sample_shares
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.sde import SDE_KINDS, log_prob, sde_transition, transition_mean
from flashgrpo_core.seeds import normal
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


@pytest.fixture(scope="module")
def policy() -> WanPolicy:
    return tiny_policy(moved=0.1)


def count_forwards(policy: WanPolicy, action) -> int:  # noqa: ANN001
    """Videos that went through the transformer while `action` ran."""
    seen: list[int] = []
    handle = policy.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    try:
        action()
    finally:
        handle.remove()
    return sum(seen)


def ode_of(sampler: RolloutSampler, group: PromptGroup) -> torch.Tensor:
    return sample_ode(
        sampler.policy,
        group.noise_seeds,
        sampler.schedule,
        sampler.settings,
        embedding(group.prompt),
        sampler.negative,
    )


# Noise 0 is the ODE.


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("kind", SDE_KINDS)
def test_noise_zero_equals_ode_sampling_bit_for_bit(
    policy: WanPolicy, kind: str, guidance: float
) -> None:
    sampler = tiny_sampler(policy, kind=kind, eta=0.0, guidance=guidance, micro_batch=2)
    for group in tiny_groups(2, noise="independent"):
        plain = ode_of(sampler, group)
        for samples in (range(0, 2), range(2, 4)):
            rollout = sampler.sample(group, samples)
            assert torch.equal(rollout.final, plain[samples.start : samples.stop])
            assert not rollout.old_log_prob.any()
    assert not torch.equal(plain[0], plain[1])


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_noise_zero_equals_ode_sampling_with_shared_noise(
    policy: WanPolicy, shared_prefix: bool
) -> None:
    sampler = tiny_sampler(policy, eta=0.0, micro_batch=1, shared_prefix=shared_prefix)
    for group in tiny_groups(2):
        plain = ode_of(sampler, group)
        for i in range(group.size):
            assert torch.equal(sampler.sample(group, range(i, i + 1)).final[0], plain[i])


def test_ode_sampling_is_euler_written_out(policy: WanPolicy) -> None:
    sampler = tiny_sampler(policy, guidance=4.5, micro_batch=2)
    seeds, schedule = (11, 22, 33), sampler.schedule
    got = sample_ode(policy, seeds, schedule, sampler.settings, embedding("x"), sampler.negative)
    assert got.shape == (3, *SHAPE) and got.dtype == torch.float32
    for rows in ((0, 1), (2,)):
        x = torch.stack([normal(SHAPE, seeds[i]) for i in rows])
        with torch.no_grad():
            for i in range(schedule.steps):
                v, v0 = (
                    policy.velocity(x, float(schedule.timesteps[i]), c)
                    for c in (embedding("x"), sampler.negative)
                )
                x = x + (v0 + 4.5 * (v - v0)) * (schedule.sigmas[i + 1] - schedule.sigmas[i])
        torch.testing.assert_close(got[list(rows)], x, rtol=0, atol=1e-5)


# The one stochastic step.


@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize(("kind", "eta"), [("flash", 1.0), ("flow", 0.7), ("cps", 0.7)])
def test_the_recorded_transition(
    policy: WanPolicy, noise: str, shared_prefix: bool, kind: str, eta: float
) -> None:
    sampler = tiny_sampler(policy, kind=kind, eta=eta, shared_prefix=shared_prefix)
    for group in tiny_groups(3, noise=noise):
        rollout = sampler.sample(group, range(4))
        step = sde_transition(sampler.schedule, group.sde_step, kind, eta)
        assert sampler.transition(group) == step
        # Before the step: the ODE from the group's noise.
        x = torch.stack([normal(SHAPE, s) for s in group.noise_seeds])
        with torch.no_grad():
            for i in range(group.sde_step):
                timestep = float(sampler.schedule.timesteps[i])
                v = policy.velocity(x, timestep, embedding(group.prompt))
                x = x + v * float(sampler.schedule.dt[i])
            v = policy.velocity(
                x, float(sampler.schedule.timesteps[group.sde_step]), embedding(group.prompt)
            )
        expected = 1 if noise == "shared" and shared_prefix else 4
        assert rollout.latents.shape == (expected, *SHAPE)
        torch.testing.assert_close(rollout.latents, x[:expected], rtol=0, atol=1e-4)
        # The step itself: noise from the sample's own seed, with the stated standard deviation.
        mean = transition_mean(step, x, v)
        eps = torch.stack([normal(SHAPE, s) for s in group.sde_seeds])
        injected = (rollout.latents_next - mean) / step.noise_std
        torch.testing.assert_close(injected, eps, rtol=0, atol=1e-3)
        assert 0.9 < injected.std() < 1.1
        torch.testing.assert_close(
            rollout.old_log_prob, log_prob(step, rollout.latents_next, mean), rtol=0, atol=1e-3
        )
        # After the step: the ODE again.
        x = rollout.latents_next
        with torch.no_grad():
            for i in range(group.sde_step + 1, sampler.schedule.steps):
                timestep = float(sampler.schedule.timesteps[i])
                v = policy.velocity(x, timestep, embedding(group.prompt))
                x = x + v * float(sampler.schedule.dt[i])
        torch.testing.assert_close(rollout.final, x, rtol=0, atol=1e-5)


def test_samples_of_a_shared_group_differ_by_their_action_only(policy: WanPolicy) -> None:
    group = tiny_groups(2)[1]
    rollout = tiny_sampler(policy).sample(group, range(4))
    assert len({t.sum().item() for t in rollout.final}) == 4
    for i in range(4):
        for j in range(i):
            assert (rollout.latents_next[i] - rollout.latents_next[j]).std() > 0.05


# Sharing the prefix.


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_a_shared_prefix_gives_the_unshared_rollouts(policy: WanPolicy, guidance: float) -> None:
    groups = tiny_groups(3, size=5)
    shared, unshared = (
        sample_all(tiny_sampler(policy, guidance=guidance, shared_prefix=s), groups)
        for s in (True, False)
    )
    for a, b in zip(shared, unshared, strict=True):
        assert len(a.latents) == 1 and len(b.latents) == len(b.samples) == len(a.samples)
        for got, wanted in (
            (a.latents.expand_as(b.latents), b.latents),
            (a.latents_next, b.latents_next),
            (a.final, b.final),
            (a.old_log_prob, b.old_log_prob),
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_the_cut_into_micro_batches_does_not_change_the_noise(policy: WanPolicy) -> None:
    groups = tiny_groups(2, size=5, noise="independent")
    whole = sample_all(tiny_sampler(policy, micro_batch=5), groups)
    for micro_batch in (1, 2, 3):
        parts = sample_all(tiny_sampler(policy, micro_batch=micro_batch), groups)
        for group, one in zip(groups, whole, strict=True):
            mine = [r for r in parts if r.group is group]
            assert [i for r in mine for i in r.samples] == list(range(5))
            torch.testing.assert_close(
                torch.cat([r.final for r in mine]), one.final, rtol=0, atol=1e-4
            )


def test_independent_noise_is_never_shared() -> None:
    settings = RolloutSettings(SHAPE, shared_prefix=True)
    independent, shared = tiny_groups(2, noise="independent")[0], tiny_groups(2)[0]
    assert settings.shares(shared) and not settings.shares(independent)
    assert not dataclasses.replace(settings, shared_prefix=False).shares(shared)


# Other processes.


@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_a_transition_is_redrawn_bit_for_bit_on_another_process(
    noise: str, micro_batch: int
) -> None:
    """Two processes with their own network sample their part and redraw the other's."""
    groups = tiny_groups(3, size=5, noise=noise)
    shares = sample_shares(groups, micro_batch)
    samplers = [tiny_sampler(tiny_policy(moved=0.1), micro_batch=micro_batch) for _ in range(2)]
    dealt = [World(rank, 2).deal(shares) for rank in range(2)]
    assert dealt[0] + dealt[1] == shares
    for rank in range(2):
        other = samplers[1 - rank]
        for g, samples in dealt[rank]:
            mine = samplers[rank].sample(groups[g], samples)
            theirs = other.transition_of(groups[g], samples)
            same(mine, theirs)
            if noise == "shared":  # the whole group, as the train step asks for it
                whole = other.transition_of(groups[g])
                assert whole.samples == range(5)
                rows = slice(samples.start, samples.stop)
                assert torch.equal(whole.latents, mine.latents)
                assert torch.equal(whole.latents_next[rows], mine.latents_next)
                assert torch.equal(whole.old_log_prob[rows], mine.old_log_prob)


def same(a: Rollout, b: Rollout) -> None:
    assert (a.group, a.samples) == (b.group, b.samples)
    assert torch.equal(a.latents, b.latents)
    assert torch.equal(a.latents_next, b.latents_next)
    assert torch.equal(a.old_log_prob, b.old_log_prob)


def test_rollouts_repeat_whatever_was_sampled_before(policy: WanPolicy) -> None:
    groups = tiny_groups(3)
    first = sample_all(tiny_sampler(policy), groups)
    sampler = tiny_sampler(policy)
    torch.manual_seed(999)
    for group, wanted in reversed(list(zip(groups, first, strict=True))):
        again = sampler.sample(group, range(4))
        same(again, wanted)
        assert torch.equal(again.final, wanted.final)


def test_the_prefix_of_another_iteration_is_not_reused(policy: WanPolicy) -> None:
    """The same prompt has the same group id in every iteration, but other noise and step."""
    old, new = tiny_groups(2)[0], tiny_groups(2, iteration=2)[0]
    assert old.group_id == new.group_id and old.noise_seeds != new.noise_seeds
    sampler = tiny_sampler(policy)
    sampler.sample(old, range(2))
    same(sampler.sample(new, range(2)), tiny_sampler(policy).sample(new, range(2)))


def test_a_changed_policy_needs_forget_and_forget_is_enough() -> None:
    policy = tiny_policy(moved=0.1)
    sampler, group = tiny_sampler(policy), tiny_groups(2, window=(1, 3))[0]
    before = sampler.sample(group, range(2))
    perturb(policy, 0.1, seed=9)
    sampler.forget()
    after = sampler.sample(group, range(2))
    assert not torch.equal(before.latents, after.latents)
    same(after, tiny_sampler(policy).sample(group, range(2)))


# Counting and covering.


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_the_announced_forwards_are_the_real_ones(
    policy: WanPolicy, guidance: float, shared_prefix: bool, noise: str, micro_batch: int
) -> None:
    groups = tiny_groups(2, noise=noise, window=(0, 3))
    sampler = tiny_sampler(
        policy,
        make_schedule("simple", 4, 3.0),
        guidance=guidance,
        shared_prefix=shared_prefix,
        micro_batch=micro_batch,
    )
    real = count_forwards(policy, lambda: sample_all(sampler, groups))
    assert real == rollout_forwards(groups, sampler.schedule, sampler.settings) > 0


def test_forwards_of_the_default_recipe() -> None:
    """20 steps, 8 videos: the SDE step's own forward is shared too, so less than k + G (N - k)."""
    settings, schedule = RolloutSettings(SHAPE), make_schedule("simple", 20, 3.0)
    groups = [dataclasses.replace(g, sde_step=0) for g in tiny_groups(2, size=8)]
    for k in range(10):
        groups = [dataclasses.replace(g, sde_step=k) for g in groups]
        assert rollout_forwards(groups, schedule, settings) == 2 * (k + 1 + 8 * (19 - k))
    unshared = dataclasses.replace(settings, shared_prefix=False, guidance=4.5)
    assert rollout_forwards(groups, schedule, unshared) == 2 * 2 * 8 * 20


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_shares_cover_every_sample_once_and_stay_inside_groups(micro_batch: int, size: int) -> None:
    groups = tiny_groups(3, size=size)
    shares = sample_shares(groups, micro_batch)
    covered = [(g, i) for g, samples in shares for i in samples]
    assert covered == [(g, i) for g in range(3) for i in range(size)]
    assert all(0 < len(samples) <= micro_batch for _, samples in shares)


# The host.


class Counting(Control):
    def __init__(self, limit: int | None = None) -> None:
        self.checks = self.ticks = 0
        self.limit = limit

    def check(self) -> None:
        self.checks += 1
        if self.limit is not None and self.checks > self.limit:
            raise Cancelled

    def tick(self, done: int = 1) -> None:
        self.ticks += done


def test_the_host_is_asked_before_every_step_and_told_every_video(policy: WanPolicy) -> None:
    sampler, group = tiny_sampler(policy), tiny_groups(2, noise="independent")[0]
    sampler.control = control = Counting()
    sampler.sample(group, range(0, 3))
    assert control.checks == sampler.schedule.steps and control.ticks == 3
    control = Counting()
    sample_ode(policy, (1, 2), sampler.schedule, sampler.settings, embedding("x"), control=control)
    assert control.checks == sampler.schedule.steps and control.ticks == 2


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_cancel_takes_effect_within_one_step(policy: WanPolicy, limit: int) -> None:
    sampler, group = tiny_sampler(policy), tiny_groups(2, noise="independent")[0]
    sampler.control = Counting(limit)

    def interrupted() -> None:
        with pytest.raises(Cancelled):
            sampler.sample(group, range(2))

    assert count_forwards(policy, interrupted) == 2 * limit


def test_recorded_tensors_hold_no_graph(policy: WanPolicy) -> None:
    rollout = tiny_sampler(policy).sample(tiny_groups(2)[0], range(4))
    for tensor in (rollout.latents, rollout.latents_next, rollout.old_log_prob, rollout.final):
        assert not tensor.requires_grad and tensor.dtype == torch.float32
        assert not tensor.is_inference(), "an inference tensor cannot enter the train step's graph"


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_shortened_suffix_changes_the_video_and_not_the_transition(policy, share) -> None:
    schedule = make_schedule("simple", 12, 3.0)
    groups = tiny_groups(2, window=(0, 6))
    plain = tiny_sampler(policy, schedule)
    short = tiny_sampler(policy, schedule)
    short.settings = dataclasses.replace(short.settings, suffix_share=share)
    wanted, got = sample_all(plain, groups), sample_all(short, groups)
    for left, right in zip(wanted, got, strict=True):
        for name in ("latents", "latents_next", "old_log_prob"):
            assert torch.equal(getattr(left, name), getattr(right, name)), name
        assert not torch.equal(left.final, right.final)
    real = count_forwards(policy, lambda: sample_all(short, groups))
    assert real == rollout_forwards(groups, schedule, short.settings)
    assert real < rollout_forwards(groups, schedule, plain.settings)
