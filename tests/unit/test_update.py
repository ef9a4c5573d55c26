"""The train step: its gradient against closed forms, its invariances, what it measures."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from flashgrpo_core.config import LossConfig, OptimConfig
from flashgrpo_core.distributed import World
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.groups import PromptGroup
from flashgrpo_core.loss import rectification_weights
from flashgrpo_core.rollout import Rollout, RolloutSampler, sample_shares
from flashgrpo_core.seeds import normal
from flashgrpo_core.update import (
    GradientStats,
    PolicyOptimizer,
    policy_gradient,
    update_units,
)
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
from tests.unit._train import (
    ELEMENTS,
    WINDOW,
    Gradient,
    Part,
    advantages_for,
    norm,
    relative_difference,
    update,
)


def recut(rollouts: list[Rollout], size: int) -> list[Rollout]:
    """The same recorded transitions in smaller pieces."""
    pieces = []
    for r in rollouts:
        for start in range(0, len(r.samples), size):
            rows = slice(start, start + size)
            pieces.append(
                Rollout(
                    r.group,
                    r.samples[rows],
                    r.latents[rows],
                    r.latents_next[rows],
                    r.old_log_prob[rows],
                    r.final[rows],
                )
            )
    return pieces


def noise_of(group: PromptGroup) -> torch.Tensor:
    """The SDE noise of a group, from its seeds alone, `[G, C, T, H, W]`."""
    return torch.stack([normal(SHAPE, seed) for seed in group.sde_seeds])


@torch.no_grad()
def velocities(
    sampler: RolloutSampler, groups: list[PromptGroup], rollouts: list[Rollout]
) -> dict[str, torch.Tensor]:
    """Present velocity at the recorded latents of each group, float64, sample by sample."""
    found: dict[str, list[torch.Tensor]] = {g.group_id: [] for g in groups}
    for r in rollouts:
        for row in range(len(r.samples)):
            latents = r.latents[row : row + 1] if len(r.latents) > 1 else r.latents
            found[r.group.group_id].append(sampler.velocity(r.group, latents).double())
    return {key: torch.cat(rows) for key, rows in found.items()}


# On policy.


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize(
    ("noise", "shared_prefix", "micro_batch"),
    [
        ("shared", True, 4),
        ("shared", True, 1),
        ("shared", False, 2),
        ("independent", True, 4),
        ("independent", True, 3),
    ],
)
def test_the_ratio_is_exactly_one_before_the_first_update(
    guidance: float, noise: str, shared_prefix: bool, micro_batch: int
) -> None:
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(
        policy, guidance=guidance, shared_prefix=shared_prefix, micro_batch=micro_batch
    )
    groups = tiny_groups(2, noise=noise)
    advantages = advantages_for(groups)
    gradient, stats = update(sampler, groups, sample_all(sampler, groups), advantages)
    assert stats.ratio_drift == 0.0
    assert stats.clip_fraction == 0.0 and stats.kl == 0.0
    weights = rectification_weights([g.sde_step for g in groups], sampler.schedule, WINDOW)
    wanted = -(weights[:, None] * advantages).mean()
    assert stats.loss == pytest.approx(wanted, abs=1e-6)
    assert norm(gradient) > 0


def test_the_loss_of_unit_advantages_is_minus_one() -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy), tiny_groups(3)
    ones = np.ones((3, 4))
    _, stats = update(sampler, groups, sample_all(sampler, groups), ones, rectification="none")
    assert stats.loss == pytest.approx(-1.0, abs=1e-6)
    # The three groups cover the window once, so weights with mean 1 over the pool do the same.
    assert sorted(g.sde_step for g in groups) == [0, 1, 2]
    _, stats = update(sampler, groups, sample_all(sampler, groups), ones)
    assert stats.loss == pytest.approx(-1.0, abs=1e-6)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize("rectification", ["pool", "update", "none"])
def test_the_gradient_is_the_closed_form(guidance: float, noise: str, rectification: str) -> None:
    """On policy dL/dv = w A lambda eps / (D n), pushed through the network by hand."""
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy, guidance=guidance)
    groups = tiny_groups(3, noise=noise)
    rollouts = sample_all(sampler, groups)
    advantages = advantages_for(groups)
    got, _ = update(sampler, groups, rollouts, advantages, rectification=rectification)
    inverse = np.array([1 / sampler.transition(g).gradient_scale for g in groups])
    weights = {
        "pool": inverse / inverse.mean(),  # the groups cover the window once
        "update": inverse / inverse.mean(),
        "none": np.ones(3),
    }[rectification]
    for p in policy.parameters().values():
        p.grad = None
    for row, (group, rollout) in enumerate(zip(groups, rollouts, strict=True)):
        scale = torch.from_numpy(weights[row] * advantages[row] / inverse[row]).float()
        push = scale.view(-1, 1, 1, 1, 1) * noise_of(group) / (ELEMENTS * advantages.size)
        if noise == "shared":
            push = push.sum(0, keepdim=True)  # all samples share one velocity
        sampler.velocity(group, rollout.latents).backward(push)
    wanted = {name: p.grad for name, p in policy.parameters().items()}
    assert relative_difference(got, wanted) < 1e-4


def test_a_step_raises_the_probability_of_good_actions() -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy), tiny_groups(3)
    rollouts, advantages = sample_all(sampler, groups), advantages_for(groups)
    gradient, before = update(sampler, groups, rollouts, advantages)
    optimizer = PolicyOptimizer(policy, OptimConfig(learning_rate=1e-4, warmup=0), ELEMENTS)
    optimizer.step(gradient)
    _, after = update(sampler, groups, rollouts, advantages, clip=1.0)
    assert after.ratio_drift > 0
    assert after.loss < before.loss


# Off policy.


@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_after_a_change_the_log_ratio_is_the_closed_form(noise: str, guidance: float) -> None:
    """log r = mean_d( -lambda eps dv - lambda^2 dv^2 / 2 ), eps from the seeds."""
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy, guidance=guidance)
    groups = tiny_groups(3, noise=noise)
    rollouts, advantages = sample_all(sampler, groups), advantages_for(groups)
    old = velocities(sampler, groups, rollouts)
    perturb(policy, 0.05, seed=9)
    new = velocities(sampler, groups, rollouts)
    weights = rectification_weights([g.sde_step for g in groups], sampler.schedule, WINDOW)
    clip, losses, drifts, cuts = 2e-3, [], [], []
    for row, group in enumerate(groups):
        change = new[group.group_id] - old[group.group_id]
        scale = sampler.transition(group).gradient_scale
        terms = -scale * noise_of(group).double() * change - 0.5 * scale**2 * change.square()
        log_ratio = terms.flatten(1).mean(1).numpy()
        ratio, a = np.exp(log_ratio), advantages[row]
        losses.append(
            weights[row] * np.maximum(-a * ratio, -a * np.clip(ratio, 1 - clip, 1 + clip))
        )
        cuts.append((a > 0) & (ratio > 1 + clip) | (a < 0) & (ratio < 1 - clip))
        drifts.append(np.abs(log_ratio).max())
    _, stats = update(sampler, groups, rollouts, advantages, clip=clip)
    assert max(drifts) > 5e-3, "too small a change shows nothing"
    assert stats.ratio_drift == pytest.approx(max(drifts), rel=1e-3)
    assert stats.loss == pytest.approx(np.mean(losses), abs=1e-5)
    assert stats.clip_fraction == np.mean(cuts) > 0


def test_the_clip_removes_exactly_the_gradient_of_cut_samples() -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy, micro_batch=2), tiny_groups(2, noise="independent")
    rollouts = sample_all(sampler, groups)
    old = np.concatenate([r.old_log_prob.numpy() for r in rollouts]).reshape(2, 4)
    perturb(policy, 0.05, seed=9)
    # Which way each ratio went, seen from outside: the new log-probs of the same actions.
    moved = np.concatenate(
        [
            sampler_log_prob(sampler, r) for r in rollouts
        ]
    ).reshape(2, 4) - old  # fmt: skip
    assert np.abs(moved).min() > 1e-5
    away = np.sign(moved)  # an advantage of this sign pushes the ratio further out
    gradient, stats = update(sampler, groups, rollouts, away, clip=1e-6)
    assert stats.clip_fraction == 1.0
    assert all(not g.any() for g in gradient.values()), "must be exactly zero"
    back, stats = update(sampler, groups, rollouts, -away, clip=1e-6)
    assert stats.clip_fraction == 0.0 and norm(back) > 0
    # A mixture has the gradient of its uncut half alone.
    mixed = away.copy()
    mixed[:, ::2] *= -1
    only = np.where(mixed == away, 0.0, mixed)
    got, stats = update(sampler, groups, rollouts, mixed, clip=1e-6)
    assert stats.clip_fraction == 0.5
    assert relative_difference(got, update(sampler, groups, rollouts, only, clip=1e-6)[0]) < 1e-6


@torch.no_grad()
def sampler_log_prob(sampler: RolloutSampler, rollout: Rollout) -> np.ndarray:
    step = sampler.transition(rollout.group)
    v = sampler.velocity(rollout.group, rollout.latents)
    difference = rollout.latents_next - (step.a_x * rollout.latents + step.a_v * v)
    value = -difference.double().square().flatten(1).mean(1) / (2 * step.noise_std**2)
    return (value - math.log(step.noise_std) - 0.5 * math.log(2 * math.pi)).numpy()


# However the work is cut.


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_micro_batches_give_the_same_gradient(guidance: float) -> None:
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy, guidance=guidance)
    groups = tiny_groups(3, noise="independent")
    rollouts = sample_all(sampler, groups)
    perturb(policy, 0.02, seed=9)  # off policy, so that ratios take part
    whole, one = update(sampler, groups, rollouts, clip=1.0)
    for size in (1, 2, 3):
        parts, other = update(sampler, groups, recut(rollouts, size), clip=1.0)
        assert 0 < relative_difference(parts, whole) < 1e-5
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
        assert other.forwards == one.forwards


def test_micro_batches_of_the_rollout_give_the_same_gradient() -> None:
    policy, groups = tiny_policy(moved=0.1), tiny_groups(2, noise="independent")
    results = []
    for micro_batch in (4, 2):
        sampler = tiny_sampler(policy, micro_batch=micro_batch)
        results.append(update(sampler, groups, sample_all(sampler, groups))[0])
    assert relative_difference(*results) < 1e-5


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_shared_path_has_the_unshared_gradient(guidance: float) -> None:
    policy, groups = tiny_policy(moved=0.1), tiny_groups(3)
    results, forwards = [], []
    for shared_prefix in (True, False):
        sampler = tiny_sampler(policy, guidance=guidance, shared_prefix=shared_prefix)
        gradient, stats = update(sampler, groups, sample_all(sampler, groups))
        results.append(gradient)
        forwards.append(stats.forwards)
    assert relative_difference(*results) < 1e-5
    assert forwards[1] == 4 * forwards[0], "one forward and backward per group, not per video"


def test_the_order_of_the_work_does_not_change_a_bit() -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy, micro_batch=2), tiny_groups(3, noise="independent")
    rollouts = sample_all(sampler, groups)
    one, _ = update(sampler, groups, rollouts)
    other, _ = update(sampler, groups, rollouts[::-1])
    assert all(torch.equal(one[n].float(), other[n].float()) for n in one)


def test_parts_of_a_shared_group_may_come_in_any_order() -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy, micro_batch=1), tiny_groups(2)
    rollouts = sample_all(sampler, groups)
    one, _ = update(sampler, groups, rollouts)
    other, stats = update(sampler, groups, rollouts[::-1])
    assert stats.ratio_drift == 0.0
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("noise", ["shared", "independent"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_add_up_to_the_single_process(noise: str, size: int) -> None:
    """Also in a second, off-policy update: what is redrawn belongs to the sampling policy."""
    groups = tiny_groups(3, size=5, noise=noise)
    advantages = advantages_for(groups)
    used = np.ones(advantages.shape, bool)
    used[1, 2:] = used[0, 0] = False
    shares = sample_shares(groups, 2)

    def two_updates(world: World) -> list[tuple[Gradient, GradientStats]]:
        policy = tiny_policy(moved=0.1)
        sampler = tiny_sampler(policy, micro_batch=2)
        rollouts = [sampler.sample(groups[g], samples) for g, samples in world.deal(shares)]
        sampler.forget()
        units = update_units(sampler, groups, rollouts, used, world)
        results = []
        for _ in range(2):
            results.append(
                policy_gradient(
                    policy, sampler, groups, units, advantages, used, LossConfig(clip=1.0),
                    WINDOW, world=world,
                )
            )  # fmt: skip
            perturb(policy, 0.02, seed=9)
            sampler.forget()
        return results

    alone = two_updates(World())
    parts = [two_updates(Part(rank, size)) for rank in range(size)]
    assert alone[0][1].ratio_drift == 0.0 < alone[1][1].ratio_drift
    for turn, (gradient, stats) in enumerate(alone):
        mine = [part[turn] for part in parts]
        for name, wanted in gradient.items():
            assert torch.equal(sum(g[name] for g, _ in mine).float(), wanted.float()), name
        assert sum(s.loss for _, s in mine) == pytest.approx(stats.loss, abs=1e-12)
        assert sum(s.clip_fraction for _, s in mine) == stats.clip_fraction
        assert sum(s.forwards for _, s in mine) == stats.forwards
        assert max(s.ratio_drift for _, s in mine) == stats.ratio_drift


# What is used and what is measured.


@pytest.mark.parametrize("noise", ["shared", "independent"])
def test_unused_samples_leave_loss_gradient_and_count(noise: str) -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy), tiny_groups(3, noise=noise)
    rollouts, advantages = sample_all(sampler, groups), advantages_for(groups)
    used = np.ones((3, 4), bool)
    used[0, 1] = used[2, 3] = False
    used[1] = False
    poisoned = np.where(used, advantages, 1e6)
    got, stats = update(sampler, groups, rollouts, poisoned, used)
    # The mean over 6 samples: an unmasked update of 12 with zero advantages, scaled up.
    whole, all_stats = update(sampler, groups, rollouts, np.where(used, advantages, 0.0))
    assert relative_difference(got, {n: g * 2 for n, g in whole.items()}) < 1e-6
    assert stats.loss == pytest.approx(2 * all_stats.loss, abs=1e-6)
    assert set(stats.by_step) == {groups[0].sde_step, groups[2].sde_step}
    assert stats.forwards == (2 if noise == "shared" else 8)


def test_an_update_without_usable_samples_is_an_error() -> None:
    policy = tiny_policy()
    sampler, groups = tiny_sampler(policy), tiny_groups(2)
    with pytest.raises(FlashGRPOError, match="nothing to train on"):
        update(sampler, groups, [], np.zeros((2, 4)), np.zeros((2, 4), bool))


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("noise", ["shared", "independent"])
def test_forwards_with_gradient_are_counted(guidance: float, noise: str) -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy, guidance=guidance), tiny_groups(2, noise=noise)
    rollouts = sample_all(sampler, groups)
    seen: list[int] = []

    def count(module, args, kwargs) -> None:  # noqa: ANN001
        if torch.is_grad_enabled():
            seen.append(len(kwargs["hidden_states"]))

    handle = policy.transformer.register_forward_pre_hook(count, with_kwargs=True)
    _, stats = update(sampler, groups, rollouts)
    handle.remove()
    assert sum(seen) == stats.forwards > 0


def test_gradient_norms_by_step_before_and_after_rectification() -> None:
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy)
    groups = tiny_groups(3)
    groups[1] = dataclasses.replace(groups[1], sde_step=groups[0].sde_step)
    rollouts, advantages = sample_all(sampler, groups), advantages_for(groups)
    _, stats = update(sampler, groups, rollouts, advantages)
    alone = []
    for row in range(3):
        used = np.zeros((3, 4), bool)
        used[row] = True
        raw, _ = update(sampler, groups, rollouts, advantages, used, rectification="none")
        alone.append(norm(raw))
    shared_step, other_step = groups[0].sde_step, groups[2].sde_step
    raw = {
        shared_step: math.sqrt((alone[0] ** 2 + alone[1] ** 2) / 2),
        other_step: alone[2],
    }
    assert set(stats.by_step) == set(raw)
    for step, wanted in raw.items():
        (weight,) = rectification_weights([step], sampler.schedule, WINDOW)
        assert stats.by_step[step]["raw"] == pytest.approx(wanted, rel=1e-5)
        assert stats.by_step[step]["rectified"] == pytest.approx(weight * wanted, rel=1e-5)


def test_only_the_lora_gets_a_gradient_and_none_is_left_behind() -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy), tiny_groups(2)
    gradient, _ = update(sampler, groups, sample_all(sampler, groups))
    assert gradient.keys() == policy.parameters().keys()
    for name, tensor in gradient.items():
        assert tensor.dtype == torch.float64 and tensor.abs().max() > 0, name
    assert all(p.grad is None for p in policy.transformer.parameters())


# KL to the reference.


def test_kl_is_measured_against_the_reference_policy() -> None:
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy), tiny_groups(3)
    rollouts, advantages = sample_all(sampler, groups), advantages_for(groups)
    live = velocities(sampler, groups, rollouts)
    with policy.reference():
        base = velocities(sampler, groups, rollouts)
    wanted = np.mean(
        [
            0.5
            * sampler.transition(g).gradient_scale ** 2
            * float((live[g.group_id] - base[g.group_id]).square().mean())
            for g in groups
        ]
    )
    plain, without = update(sampler, groups, rollouts, advantages)
    held, stats = update(sampler, groups, rollouts, advantages, kl=0.5)
    assert stats.kl == pytest.approx(wanted, rel=1e-4) and wanted > 1e-3
    assert without.kl == 0.0
    assert stats.loss == pytest.approx(without.loss + 0.5 * wanted, rel=1e-4)
    # The KL term is linear in its weight and pulls the velocity towards the reference's.
    twice, _ = update(sampler, groups, rollouts, advantages, kl=1.0)
    pull = {n: held[n] - plain[n] for n in plain}
    assert relative_difference({n: twice[n] - plain[n] for n in plain}, {
        n: 2 * g for n, g in pull.items()
    }) < 1e-4  # fmt: skip
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            parameter -= 1e-3 * (pull[name] / norm(pull)).float()
    assert update(sampler, groups, rollouts, advantages, kl=1.0)[1].kl < stats.kl


@pytest.mark.parametrize("noise", ["shared", "independent"])
def test_kl_of_a_fresh_policy_is_zero(noise: str) -> None:
    policy = tiny_policy()
    sampler, groups = tiny_sampler(policy), tiny_groups(2, noise=noise)
    rollouts = sample_all(sampler, groups)
    plain, _ = update(sampler, groups, rollouts)
    held, stats = update(sampler, groups, rollouts, kl=1.0)
    assert stats.kl == 0.0 == stats.ratio_drift
    assert all(torch.equal(plain[n], held[n]) for n in plain)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_kl_of_a_continued_lora_is_against_its_start(checkpointing: bool) -> None:
    policy = tiny_policy(moved=0.1, checkpointing=checkpointing)
    policy.set_reference(policy.snapshot())
    sampler, groups = tiny_sampler(policy), tiny_groups(2)
    rollouts = sample_all(sampler, groups)
    _, stats = update(sampler, groups, rollouts, kl=1.0)
    assert stats.kl == 0.0
    perturb(policy, 0.1, seed=9)
    weights = policy.snapshot()
    gradient, stats = update(sampler, groups, rollouts, kl=1.0)
    assert stats.kl > 1e-4 and norm(gradient) > 0
    assert all(torch.equal(weights[n], t) for n, t in policy.snapshot().items())


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_gradient_checkpointing_changes_nothing(kl: float) -> None:
    results = []
    for checkpointing in (False, True):
        policy = tiny_policy(moved=0.1, checkpointing=checkpointing)
        sampler, groups = tiny_sampler(policy, guidance=4.5), tiny_groups(2)
        results.append(update(sampler, groups, sample_all(sampler, groups), kl=kl))
    (plain, a), (saved, b) = results
    assert all(torch.equal(plain[n], saved[n]) for n in plain)
    assert a == b and b.ratio_drift == 0.0
