"""Adaptive draws: the measurement of a step's signal, and that its use leaves the mean as it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flashgrpo_core.advantage import faded_stds
from flashgrpo_core.choosing import adapt_steps, iteration_groups, unsaturated_prompts
from flashgrpo_core.config import LossConfig
from flashgrpo_core.config_io import build_config
from flashgrpo_core.distributed import World
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.groups import prompt_key
from flashgrpo_core.prompts import Prompt, PromptSplit
from flashgrpo_core.signals import (
    SKETCH,
    Sketcher,
    StepSignals,
    draw_by,
    step_probabilities,
)
from flashgrpo_core.update import policy_gradient, update_units
from tests.unit._tiny import (  # noqa: F401
    one_thread,
    sample_all,
    tiny_groups,
    tiny_policy,
    tiny_sampler,
)
from tests.unit._train import WINDOW, advantages_for, norm, update

PROMPTS = [Prompt(f"prompt {i}") for i in range(8)]


def sketch_of(vector: torch.Tensor, sketcher: Sketcher) -> torch.Tensor:
    sums = torch.zeros(SKETCH, dtype=torch.float64)
    sketcher.add(sums, "one", vector[:700])
    sketcher.add(sums, "two", vector[700:].view(30, -1))
    return sums


def test_a_sketch_is_linear_and_keeps_inner_products() -> None:
    rng = torch.Generator().manual_seed(0)
    sketcher, errors = Sketcher(), []
    vectors = torch.randn((60, 1000), dtype=torch.float64, generator=rng)
    sketches = torch.stack([sketch_of(v, sketcher) for v in vectors])
    both = sketch_of(vectors[0] - 2 * vectors[1], sketcher)
    torch.testing.assert_close(both, sketches[0] - 2 * sketches[1], rtol=1e-12, atol=1e-12)
    for i in range(59):
        a, b = vectors[i], vectors[i + 1] + 0.5 * vectors[i]
        true = float(a @ b)
        got = float(sketches[i] @ (sketches[i + 1] + 0.5 * sketches[i]))
        errors.append((got - true) / float(a.norm() * b.norm()))
    assert abs(np.mean(errors)) < 3 * np.std(errors) / np.sqrt(59)
    assert 0.5 < np.std(errors) / np.sqrt(2 / SKETCH) < 1.3
    again = sketch_of(vectors[0], Sketcher())
    assert torch.equal(again, sketches[0]), "the signs come from the names alone"


def test_the_ratio_is_estimated_without_bias() -> None:
    """Squared signal and noise of known Gaussians, step by step, from few groups per iteration."""
    true = [0.0, 0.3, 1.0]
    rng = np.random.default_rng(1)
    signals = StepSignals(5)
    found = []
    for _ in range(400):
        steps, rows = [], []
        for step, signal in zip((1, 2, 3), true, strict=True):
            for _ in range(2):
                mean = np.full(SKETCH, signal / np.sqrt(SKETCH))
                rows.append(mean + rng.normal(size=SKETCH) / np.sqrt(SKETCH))
                steps.append(step)
        signals.add(steps, np.array(rows))
        found.append(signals.ratios((1, 4)))
    mean = np.sqrt(np.mean(np.square(found[20:]), axis=0))
    assert mean[0] < 0.15 and mean[1] == pytest.approx(0.3, abs=0.06)
    assert mean[2] == pytest.approx(1.0, abs=0.1)
    assert np.isnan(signals.ratios((0, 1))).all() and np.isnan(signals.ratios((4, 5))).all()


def test_probabilities() -> None:
    assert step_probabilities(np.full(4, np.nan), 0.5).tolist() == [0.25] * 4
    assert step_probabilities(np.zeros(4), 0.5).tolist() == [0.25] * 4
    got = step_probabilities(np.array([3.0, 1.0, np.nan, 0.0]), 0.4)
    wanted = 0.1 + 0.6 * np.array([3.0, 1.0, 4 / 3, 0.0]) / (16 / 3)
    np.testing.assert_allclose(got, wanted)
    assert got.sum() == pytest.approx(1.0) and got.min() == pytest.approx(0.1)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_importance_weights_leave_the_mean_as_it_is(count: int) -> None:
    """Monte Carlo: the weighted mean over draws is that of a uniform draw, for any count.

    Also with the rule that not all groups of an update may agree, which a naive 1 / (K p) misses.
    """
    probabilities = np.array([0.6, 0.25, 0.1, 0.05])
    values = np.array([1.0, -2.0, 5.0, 0.5])
    rng = torch.Generator().manual_seed(count)
    means, naive = [], []
    for _ in range(6000):
        drawn, weights = draw_by(probabilities, count, rng)
        assert len(set(drawn)) > 1
        means.append(np.mean([w * values[i] for i, w in zip(drawn, weights, strict=True)]))
        naive.append(np.mean([values[i] / (4 * probabilities[i]) for i in drawn]))
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - values.mean()) < 4 * error
    if count == 2:
        assert abs(np.mean(naive) - values.mean()) > 8 * error
    assert max(weights) <= 1 / (4 * probabilities.min()) + 1e-9


def test_the_expected_gradient_is_that_of_the_even_draw() -> None:
    """The whole path: groups drawn by steep probabilities, weighted, through the real train step.

    Every group has its own gradient at each step; their mean over the window is what an even draw
    gives on average. The mean over many adaptive draws must approach it as chance allows.
    """
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy)
    groups = tiny_groups(3)
    advantages = advantages_for(groups)

    def gradient(found) -> dict[str, torch.Tensor]:
        return update(sampler, found, sample_all(sampler, found), advantages)[0]

    # The gradient is a mean over groups, so one for each (group, step) tells all of them.
    parts = {}
    for step in range(*WINDOW):
        at = [group.at(step) for group in groups]
        for row in range(3):
            used = np.zeros(advantages.shape, bool)
            used[row] = True
            parts[row, step] = update(sampler, at, sample_all(sampler, at), advantages, used)[0]
    flat = torch.stack([torch.cat([g.flatten() for g in parts[k].values()]) for k in parts])
    gram, keys = (flat @ flat.T).numpy(), list(parts)
    signals = StepSignals(4)
    rng = np.random.default_rng(0)
    for step, signal in enumerate((3.0, 0.5, 0.1)):
        mean = np.full(SKETCH, signal / np.sqrt(SKETCH))
        for _ in range(20):
            signals.add([step] * 2, mean + rng.normal(size=(2, SKETCH)) / np.sqrt(SKETCH))
    rows, steps = [], []
    for iteration in range(3000):
        found = adapt_steps(groups, [WINDOW], signals, 0.3, iteration, 1)
        shares = dict.fromkeys(keys, 0.0)
        for row, group in enumerate(found):
            shares[row, group.sde_step] = group.importance / 3
            steps.append(group.sde_step)
        rows.append(list(shares.values()))
        if iteration == 0:  # what is put together is what the train step computes
            mixed = torch.tensor(rows[0]) @ flat.float()
            real = torch.cat([g.flatten() for g in gradient(found).values()])
            assert float((mixed - real).norm() / real.norm()) < 1e-5
    counts = np.bincount(steps, minlength=3)
    assert counts[0] > 2 * counts[2], "the draws follow the signal"
    error = np.array(rows) - 1 / len(keys)  # against the mean over all groups and steps
    chance = np.sqrt(np.einsum("di,ij,dj->d", error, gram, error).mean() / len(error))
    even = np.sqrt(gram.mean())
    assert np.sqrt(error.mean(0) @ gram @ error.mean(0)) < 2.5 * chance < 0.1 * even


@pytest.mark.parametrize("noise", ["shared", "independent"])
def test_what_an_update_measures(noise: str) -> None:
    """The sketch of each group is that of its own gradient, without its importance weight."""
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy, micro_batch=3)
    signals = StepSignals(4)
    groups = adapt_steps(tiny_groups(3, noise=noise), [WINDOW], signals, 0.5, 1, 1)
    groups = [dataclasses.replace(g, importance=1.7) for g in groups]
    advantages = advantages_for(groups)
    rollouts = sample_all(sampler, groups)
    used = np.ones(advantages.shape, bool)
    used[0, 1] = False
    units = update_units(sampler, groups, rollouts, used, World())
    total, stats = policy_gradient(
        policy, sampler, groups, units, advantages, used, LossConfig(), WINDOW, sketch=True
    )
    plain, _ = policy_gradient(
        policy, sampler, groups, units, advantages, used, LossConfig(), WINDOW
    )
    assert all(torch.equal(total[n], plain[n]) for n in total)
    for row in range(3):
        alone = np.zeros(used.shape, bool)
        alone[row] = used[row]
        own = update(sampler, groups, rollouts, advantages, alone)[0]
        sums, sketcher = torch.zeros(SKETCH, dtype=torch.float64), Sketcher()
        for name, part in own.items():
            sketcher.add(sums, name, part / 1.7)
        difference = np.linalg.norm(stats.sketches[row] - sums.numpy())
        assert difference < 1e-4 * np.linalg.norm(sums.numpy())
    assert norm(own) > 0


def test_all_of_a_group_s_loss_has_its_importance() -> None:
    """The KL divergence too: its expectation is over the draw of steps like the rest."""
    policy = tiny_policy(moved=0.1)
    sampler, groups = tiny_sampler(policy), tiny_groups(3)
    rollouts, advantages = sample_all(sampler, groups), advantages_for(groups)
    plain, stats = update(sampler, groups, rollouts, advantages, kl=0.5)
    heavy = [dataclasses.replace(group, importance=1.7) for group in groups]
    for rollout in rollouts:
        rollout.group = heavy[groups.index(rollout.group)]
    sampler.forget()
    got, heavier = update(sampler, heavy, rollouts, advantages, kl=0.5)
    assert stats.kl > 0 and heavier.kl == pytest.approx(stats.kl, rel=1e-6)
    assert heavier.loss == pytest.approx(1.7 * stats.loss, rel=1e-5)
    assert norm({n: got[n] - 1.7 * plain[n] for n in got}) < 1e-5 * norm(got)
    for step, norms in stats.by_step.items():
        assert heavier.by_step[step] == pytest.approx(norms, rel=1e-5)


def test_state_is_complete() -> None:
    rng = np.random.default_rng(0)
    one, two = StepSignals(4), StepSignals(4)
    for _ in range(3):
        one.add([0, 2, 2], rng.normal(size=(3, SKETCH)))
    two.load_state(one.state())
    row = rng.normal(size=(1, SKETCH))
    one.add([2], row)
    two.add([2], row)
    assert all(torch.equal(one.state()[k], two.state()[k]) for k in one.state())
    assert one.ratios((2, 3)) == two.ratios((2, 3))


def config_of(**tables):
    base = {
        "model": {"transformer": "tiny"},
        "schedule": {"adaptive": True},
        "loss": {"freeze_std": True},
    }
    for table, values in tables.items():
        base[table] = base.get(table, {}) | values
    return build_config(base)


def test_the_draw_depends_on_the_past_only_through_the_signals() -> None:
    split = PromptSplit(PROMPTS, [], [])
    config = config_of()
    signals = StepSignals(10)
    first = iteration_groups(config, split, 4, signals=signals)
    assert first == iteration_groups(config, split, 4, signals=signals)
    plain = iteration_groups(config, split, 4)
    assert [g.sde_seeds for g in first] == [g.sde_seeds for g in plain]
    assert {g.importance for g in plain} == {1.0}
    signals.add([0] * 4, np.ones((4, SKETCH)))
    signals.add([3] * 4, np.random.default_rng(0).normal(size=(4, SKETCH)))
    steps = [
        g.sde_step for i in range(40) for g in iteration_groups(config, split, i, signals=signals)
    ]
    counts = np.bincount(steps, minlength=5)
    assert counts[0] > 2 * counts[3] > 0


def test_saturated_prompts_are_passed_over_and_come_back() -> None:
    keys = [prompt_key(p.text) for p in PROMPTS]
    none, after = unsaturated_prompts(PROMPTS, 6, 0, set(), 3)
    rest, end = unsaturated_prompts(PROMPTS, 2, after, set(), 3)
    assert sorted(p.text for p in none + rest) == sorted(p.text for p in PROMPTS) and end == 8
    solved = set(keys[:4])
    taken, position = [], 0
    for _ in range(200):
        chosen, position = unsaturated_prompts(PROMPTS, 4, position, solved, 3)
        taken += [prompt_key(p.text) for p in chosen]
    share = np.mean([key in solved for key in taken])
    assert share == pytest.approx(0.25 / 1.25, abs=0.04)
    counts = [taken.count(key) for key in keys]
    assert min(counts[:4]) > 10
    everything, position = unsaturated_prompts(PROMPTS, 4, 0, set(keys), 3)
    assert len(everything) == 4 and position <= 24


def test_settings_that_would_be_biased_are_refused() -> None:
    with pytest.raises(FlashGRPOError, match=r"set loss.freeze_std = true, or loss.advantage_std"):
        config_of(loss={"freeze_std": False})
    assert config_of(loss={"freeze_std": False, "advantage_std": "none"}).schedule.adaptive
    with pytest.raises(FlashGRPOError, match="set loss.rectification = 'pool'"):
        config_of(loss={"rectification": "update"})
    with pytest.raises(FlashGRPOError, match="schedule.strategy = 'flash'"):
        config_of(schedule={"strategy": "full"})
    with pytest.raises(FlashGRPOError, match="not loss.advantage_std = 'group'"):
        config_of(schedule={"adaptive": False}, loss={"advantage_std": "group"})
    with pytest.raises(FlashGRPOError, match="set eval.every above 0"):
        config_of(loss={"kl_on_drop": 0.01}, eval={"every": 0})


def test_updates_without_signal_do_not_touch_the_frozen_std() -> None:
    assert faded_stds({}, {"a": 0.0}) == {}
    assert faded_stds({"a": 0.02}, {"a": 0.0}) == {"a": 0.02}
    assert faded_stds({"a": 0.02, "b": 1.0}, {"a": 0.04}) == pytest.approx(
        {"a": (0.9 * 0.02**2 + 0.1 * 0.04**2) ** 0.5, "b": 1.0}
    )
    assert faded_stds({}, {"a": 0.5}) == {"a": 0.5}


def test_one_noise_level_per_update_is_refused() -> None:
    one = {"strategy": "window", "train_steps": 1}
    for place in ("start", "progressive"):
        with pytest.raises(FlashGRPOError, match="trains a single noise level"):
            build_config({"model": {"transformer": "tiny"}, "schedule": {**one, "place": place}})
    build_config({"model": {"transformer": "tiny"}, "schedule": {**one, "place": "random"}})
