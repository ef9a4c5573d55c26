"""DiffusionNFT: its loss and gradient against float64 computations, its rollouts and its counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashgrpo_core.config import LossConfig
from flashgrpo_core.config_io import build_config
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.forwards import rollout_forwards
from flashgrpo_core.nft import nft_gradient, nft_loss, noise_levels, noised_units, optimality
from flashgrpo_core.ode import sample_ode
from flashgrpo_core.rollout import sample_shares
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.seeds import derive_seed, normal
from flashgrpo_core.strategies import without_noise
from tests.unit._tiny import (  # noqa: F401
    SHAPE,
    embedding,
    one_thread,
    perturb,
    tiny_groups,
    tiny_policy,
    tiny_sampler,
)
from tests.unit._train import Part, advantages_for, norm, relative_difference

STEPS = 6


def setup(micro_batch: int = 4, guidance: float = 1.0):
    policy = tiny_policy(moved=0.1)
    schedule = make_schedule("simple", STEPS, 3.0)
    sampler = tiny_sampler(policy, schedule, micro_batch=micro_batch, guidance=guidance)
    groups = without_noise(tiny_groups(3, noise="independent"))
    rollouts = list(sampler.sample_all(groups, sample_shares(groups, micro_batch)))
    return policy, sampler, groups, rollouts


def counted(policy, action):
    """What `action` returns, and the videos that went through the transformer meanwhile."""
    calls: list[int] = []
    hook = policy.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    try:
        return action(), sum(calls)
    finally:
        hook.remove()


def loss_by_hand(v, old, x, clean, sigma, r, beta):
    """The formula of the module in numpy, one video at a time."""
    found = []
    for i in range(len(v)):
        value = 0.0
        for share, sign in ((r[i], 1.0), (1 - r[i], -1.0)):
            mixed = (1 - sign * beta) * old[i] + sign * beta * v[i]
            error = x[i] - sigma * mixed - clean[i]
            value += share * np.mean(error**2) / max(np.mean(np.abs(error)), 1e-5)
        found.append(value / beta)
    return np.array(found)


@pytest.mark.parametrize("beta", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("sigma", [0.05, 0.7, 1.0])
def test_the_loss_is_the_formula(beta: float, sigma: float) -> None:
    rng = torch.Generator().manual_seed(3)
    v, old, clean, noise = (
        torch.randn((4, *SHAPE), dtype=torch.float64, generator=rng) for _ in range(4)
    )
    x = (1 - sigma) * clean + sigma * noise
    r = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
    got = nft_loss(v, old, x, clean, sigma, r, beta)
    wanted = loss_by_hand(*(t.numpy() for t in (v, old, x, clean)), sigma, r.numpy(), beta)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12)


def test_the_gradient_at_the_sampling_policy() -> None:
    """-(2 r - 1) 2 sigma^2 (u - v) / mean |sigma (u - v)| / D: towards good videos, from bad ones."""
    rng = torch.Generator().manual_seed(4)
    v, clean, noise = (torch.randn((3, *SHAPE), dtype=torch.float64, generator=rng) for _ in "abc")
    sigma, r = 0.6, torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    x = (1 - sigma) * clean + sigma * noise
    leaf = v.clone().requires_grad_()
    nft_loss(leaf, v, x, clean, sigma, r, 0.3).sum().backward()
    miss = noise - clean - v
    size = (sigma * miss).abs().flatten(1).mean(1).view(-1, 1, 1, 1, 1)
    wanted = -2 * (2 * r - 1).view(-1, 1, 1, 1, 1) * sigma**2 * miss / size / math.prod(SHAPE)
    torch.testing.assert_close(leaf.grad, wanted, rtol=1e-9, atol=1e-16)


def test_optimality() -> None:
    got = optimality(torch.tensor([-9.0, -5.0, 0.0, 1.0, 5.0, 9.0]), 5.0)
    assert got.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.6, 1.0, 1.0])


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_gradient_of_an_update(guidance: float, kl: float) -> None:
    """Against autograd of the formula on noise, levels and videos made anew from the seeds."""
    policy, sampler, groups, rollouts = setup(guidance=guidance)
    advantages = advantages_for(groups)
    used = np.ones(advantages.shape, bool)
    used[1, 2] = False
    loss = LossConfig(algorithm="nft", nft_levels=2, nft_beta=0.5, kl=kl)
    units = noised_units(sampler, groups, rollouts, 2, 11, 1)
    (got, stats), forwards = counted(
        policy, lambda: nft_gradient(policy, sampler, units, advantages, used, loss)
    )
    per_velocity = 2 if guidance != 1.0 else 1
    assert stats.forwards == 3 * 4 * 2 * per_velocity  # groups, samples, levels
    assert stats.plain_forwards == (stats.forwards if kl else 0)
    assert forwards == stats.forwards + stats.plain_forwards
    total = 0.0
    levels = noise_levels(3, 2, range(STEPS), 11, 1)
    for row, group in enumerate(groups):
        clean = sample_ode(
            policy, group.noise_seeds, sampler.schedule, sampler.settings,
            embedding(group.prompt), sampler.negative,
        )  # fmt: skip
        for j, step in enumerate(levels[row]):
            sigma = float(sampler.schedule.sigmas[step])
            for i in range(group.size):
                if not used[row, i]:
                    continue
                noise = normal(SHAPE, derive_seed(group.sde_seeds[i], j, "forward noise"))
                x = (1 - sigma) * clean[i : i + 1] + sigma * noise
                v = sampler.velocity(group.at(step), x)
                shift = 0.5 * (v - v.detach())
                r = min(max(advantages[row, i] / 10 + 0.5, 0), 1)
                for share, sign in ((r, 1), (1 - r, -1)):
                    error = x - sigma * (v.detach() + sign * shift) - clean[i]
                    size = error.detach().abs().mean()
                    total = total + 5.0 / 0.5 * share * error.square().mean() / size
                if kl:
                    with torch.no_grad(), policy.reference():
                        base = sampler.velocity(group.at(step), x)
                    total = total + kl * (v - base).square().mean()
    count = 2 * int(used.sum())
    (total / count).backward()
    wanted = {name: p.grad for name, p in policy.parameters().items()}
    assert stats.loss == pytest.approx(total.item() / count, rel=1e-4)
    assert norm(got) > 0 and relative_difference(got, wanted) < 1e-4
    assert (stats.kl > 0) == bool(kl)
    assert stats.ratio_drift == stats.clip_fraction == 0.0


def test_a_second_update_is_held_by_the_policy_that_sampled() -> None:
    """v_old is kept from the first update: no forward more, and it does not follow the policy."""
    policy, sampler, groups, rollouts = setup()
    advantages = advantages_for(groups)
    used = np.ones(advantages.shape, bool)
    loss = LossConfig(algorithm="nft", nft_levels=1, nft_beta=1.0)
    units = noised_units(sampler, groups, rollouts, 1, 11, 1)

    def update():
        return nft_gradient(policy, sampler, units, advantages, used, loss)

    first, _ = update()
    kept = [unit.old.clone() for unit in units]
    perturb(policy, 0.05, seed=9)
    (second, stats), forwards = counted(policy, update)
    assert forwards == stats.forwards == 12
    assert all(torch.equal(unit.old, old) for unit, old in zip(units, kept, strict=True))
    assert relative_difference(second, first) > 0.1
    fresh = noised_units(sampler, groups, rollouts, 1, 11, 1)
    on_policy, _ = nft_gradient(policy, sampler, fresh, advantages, used, loss)
    assert relative_difference(second, on_policy) > 1e-3


def test_neither_the_cut_nor_the_ranks_matter() -> None:
    policy, sampler, groups, rollouts = setup()
    advantages = advantages_for(groups)
    used = np.ones(advantages.shape, bool)
    loss = LossConfig(algorithm="nft", nft_levels=2)

    def gradient(rollouts, world=None):
        units = noised_units(sampler, groups, rollouts, 2, 7, 3)
        return nft_gradient(policy, sampler, units, advantages, used, loss, world=world)[0]

    whole = gradient(rollouts)
    parts = [gradient(rollouts[rank::2], Part(rank, 2)) for rank in range(2)]
    assert all(torch.equal(whole[n], parts[0][n] + parts[1][n]) for n in whole)
    finer = list(sampler.sample_all(groups, sample_shares(groups, 1)))
    assert relative_difference(gradient(finer), whole) < 1e-4


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rollouts_are_plain_ode(guidance: float, share: float) -> None:
    """No transition is recorded, and the forwards are those of the formula."""
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy, make_schedule("simple", STEPS, 3.0), guidance=guidance)
    object.__setattr__(sampler.settings, "suffix_share", share)
    groups = without_noise(tiny_groups(2, noise="independent"))
    rollouts, forwards = counted(
        policy, lambda: list(sampler.sample_all(groups, sample_shares(groups, 4)))
    )
    taken = STEPS if share == 1.0 else 1 + math.ceil(share * (STEPS - 1))
    assert forwards == rollout_forwards(groups, sampler.schedule, sampler.settings)
    assert forwards == 2 * 4 * taken * (2 if guidance != 1.0 else 1)
    for group, rollout in zip(groups, rollouts, strict=True):
        assert group.steps_of(0) == () and rollout.later == []
        assert rollout.latents.numel() == rollout.old_log_prob.numel() == 0
        plain = sample_ode(
            policy, group.noise_seeds, sampler.schedule, sampler.settings,
            embedding(group.prompt), sampler.negative,
        )  # fmt: skip
        if share == 1.0:
            assert torch.equal(rollout.final, plain)
        else:
            assert 0 < float((rollout.final - plain).norm() / plain.norm()) < 0.5
        assert len({tuple(v.flatten().tolist()) for v in rollout.final}) == group.size


def test_levels_cover_the_schedule_and_change_with_the_iteration() -> None:
    drawn = noise_levels(4, 3, range(2, 8), 1, 1)
    assert [len(row) for row in drawn] == [3] * 4
    flat = [k for row in drawn for k in row]
    assert sorted(flat[:6]) == sorted(flat[6:]) == list(range(2, 8))
    assert drawn == noise_levels(4, 3, range(2, 8), 1, 1) != noise_levels(4, 3, range(2, 8), 1, 2)


def test_mistakes_are_named() -> None:
    tables = {"model": {"transformer": "tiny"}, "loss": {"algorithm": "nft"}}
    with pytest.raises(FlashGRPOError, match="set rollout.noise = 'independent'"):
        build_config(tables)
    tables["rollout"] = {"noise": "independent"}
    assert build_config(tables).loss.nft_levels == 2
    with pytest.raises(FlashGRPOError, match="schedule.strategy = 'full'"):
        build_config(tables | {"schedule": {"strategy": "full"}})
    policy, sampler, _, _ = setup()
    nothing = np.zeros((3, 4), bool)
    with pytest.raises(FlashGRPOError, match="nothing to train on"):
        nft_gradient(policy, sampler, [], np.zeros((3, 4)), nothing, LossConfig(algorithm="nft"))
