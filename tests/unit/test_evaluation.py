"""Evaluation: paired noise, masks, and intervals that resample prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flashgrpo_core import scoring
from flashgrpo_core.evaluation import EvalScores, evaluate, paired_interval, video_seed
from flashgrpo_core.ode import sample_ode
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.prompts import Prompt
from flashgrpo_core.rewards import REWARDS
from flashgrpo_core.rewards.batch import VideoBatch
from flashgrpo_core.rewards.mix import RewardMix
from flashgrpo_core.rollout import RolloutSampler
from tests.unit._tiny import (  # noqa: F401
    PROMPTS,
    SHAPE,
    embedding,
    one_thread,
    perturb,
    sample_all,
    tiny_groups,
    tiny_policy,
    tiny_sampler,
)
from tests.unit._train import Part

# Intervals.


def interval_by_hand(
    difference: np.ndarray, seed: int, level: float = 0.95, resamples: int = 20000
) -> tuple[float, float]:
    """Percentile bootstrap over the rows, with loops and other random numbers."""
    means = sorted(row.mean() for row in difference)
    rng = np.random.default_rng(seed)
    n = len(means)
    drawn = np.sort([np.mean([means[i] for i in rng.integers(0, n, n)]) for _ in range(resamples)])
    cut = (1 - level) / 2
    return float(drawn[int(cut * resamples)]), float(drawn[int((1 - cut) * resamples)])


def test_the_interval_is_a_bootstrap_over_prompts() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(size=(12, 4))
    after = before + rng.normal(0.3, 0.5, size=(12, 1)) + rng.normal(0, 0.3, size=(12, 4))
    difference, low, high = paired_interval(after, before, seed=3)
    assert difference == pytest.approx((after - before).mean(), rel=1e-12)
    by_hand = interval_by_hand(after - before, seed=8)
    np.testing.assert_allclose([low, high], by_hand, atol=0.02 * (high - low))
    assert low < difference < high
    narrow = paired_interval(after, before, seed=3, level=0.5)
    np.testing.assert_allclose(
        narrow[1:], interval_by_hand(after - before, 9, level=0.5), atol=0.03 * (high - low)
    )


def test_the_interval_repeats_and_follows_its_seed() -> None:
    rng = np.random.default_rng(1)
    after, before = rng.normal(size=(2, 9, 3))
    assert paired_interval(after, before, seed=1) == paired_interval(after, before, seed=1)
    assert paired_interval(after, before, seed=1) != paired_interval(after, before, seed=2)


def test_pairing_removes_how_prompts_differ() -> None:
    rng = np.random.default_rng(2)
    prompts = rng.normal(0, 10, size=(10, 1))
    before = prompts + rng.normal(0, 0.1, size=(10, 4))
    after = before + 0.5
    difference, low, high = paired_interval(after, before)
    assert difference == pytest.approx(0.5) and high - low < 1e-9


def test_more_videos_of_the_same_prompts_do_not_fake_precision() -> None:
    """Each prompt reacts in its own way: copies of its videos teach nothing about others."""
    rng = np.random.default_rng(3)
    effect = rng.normal(size=(8, 1))
    few = paired_interval(np.repeat(effect, 2, 1), np.zeros((8, 2)))
    many = paired_interval(np.repeat(effect, 200, 1), np.zeros((8, 200)))
    np.testing.assert_allclose(few, many, rtol=1e-9)


def test_coverage_without_any_effect() -> None:
    """Resampling prompts is wrong about as often as promised, resampling videos far more often."""
    rng = np.random.default_rng(4)
    trials, by_prompt, by_video = 300, 0, 0
    for trial in range(trials):
        difference = rng.normal(size=(16, 1)) + rng.normal(0, 0.5, size=(16, 8))
        zero = np.zeros_like(difference)
        _, low, high = paired_interval(difference, zero, seed=trial, resamples=400)
        by_prompt += not low <= 0 <= high
        flat = difference.reshape(-1, 1)
        _, low, high = paired_interval(flat, np.zeros_like(flat), seed=trial, resamples=400)
        by_video += not low <= 0 <= high
    assert 0.03 < by_prompt / trials < 0.12
    assert by_video / trials > 0.3


def test_masked_pairs_leave_the_interval() -> None:
    rng = np.random.default_rng(5)
    before, after = rng.normal(size=(2, 6, 3))
    after[0, 1] = before[2, 0] = np.nan  # one pair of each prompt
    after[4] = np.nan  # a whole prompt
    rows = [
        np.array([d for d in row if not np.isnan(d)])
        for row in np.delete(after - before, 4, axis=0)
    ]
    means = np.array([row.mean() for row in rows])
    got = paired_interval(after, before, seed=1)
    assert got[0] == pytest.approx(means.mean(), rel=1e-12)
    np.testing.assert_allclose(
        got, paired_interval(means[:, None], np.zeros((5, 1)), seed=1), rtol=1e-12
    )


@pytest.mark.filterwarnings("error")
def test_too_little_for_an_interval() -> None:
    assert np.isnan(paired_interval(np.full((3, 2), np.nan), np.zeros((3, 2)))).all()
    assert np.isnan(paired_interval(np.zeros((0, 2)), np.zeros((0, 2)))).all()
    difference, low, high = paired_interval(np.array([[1.0, 2.0]]), np.zeros((1, 2)))
    assert difference == 1.5 and np.isnan(low) and np.isnan(high)


# Scores.


def test_scores_survive_json_with_their_masks() -> None:
    total = np.array([[0.1, np.nan], [1 / 3, -2e-17]])
    scores = EvalScores(total, {"a": total, "b#2": total * 2})
    text = json.dumps(scores.to_json(), allow_nan=False)
    again = EvalScores.from_json(json.loads(text))
    np.testing.assert_array_equal(again.total, total)
    assert list(again.terms) == ["a", "b#2"]
    np.testing.assert_array_equal(again.terms["b#2"], total * 2)
    assert again.total.dtype == np.float64


def test_the_mean_weighs_prompts_equally() -> None:
    total = np.array([[1.0, np.nan, np.nan], [2.0, 3.0, 4.0]])
    assert EvalScores(total, {}).mean == 2.0


def test_seeds_of_videos() -> None:
    fish = Prompt("fish")
    base = video_seed(1, "test", fish, 0)
    others = {
        video_seed(2, "test", fish, 0),
        video_seed(1, "validation", fish, 0),
        video_seed(1, "test", Prompt("bird"), 0),
        video_seed(1, "test", Prompt("fish", "a.png"), 0),
        video_seed(1, "test", fish, 1),
    }
    assert len(others) == 5 and base not in others
    assert base == video_seed(1, "test", Prompt("fish"), 0)
    group = tiny_groups(2)[0]
    training = {*group.noise_seeds, *group.sde_seeds}
    assert video_seed(5, "test", Prompt(group.prompt), 0) not in training


# The whole evaluation, with a decoder that keeps the numbers of the latents readable.


def decode(vae: object, latents: torch.Tensor) -> np.ndarray:
    """`[B, C, T, H, W]` to `[B, T, H, W, 3]`: channels 0 to 2, 40 grey levels per unit."""
    levels = (latents[:, :3].permute(0, 2, 3, 4, 1) * 40 + 128).round().clamp(0, 255)
    return levels.to(torch.uint8).numpy()


class Brightness:
    """Mean grey level; NaN for videos it is told to fail on."""

    name = "brightness"
    whole_batch = True

    def __init__(self, fail_above: float = 1e9) -> None:
        self.fail_above = fail_above

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        value = batch.videos.astype(np.float64).mean((1, 2, 3, 4))
        return {self.name: np.where(value > self.fail_above, np.nan, value)}


class Contrast:
    """Standard deviation of grey levels."""

    name = "contrast"
    whole_batch = True

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        return {self.name: batch.videos.astype(np.float64).std((1, 2, 3, 4))}


@pytest.fixture(autouse=True)
def readable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scoring, "decode_latents", decode)
    monkeypatch.setitem(REWARDS, "brightness", Brightness)
    monkeypatch.setitem(REWARDS, "contrast", Contrast)
    yield


HELD = [Prompt(text) for text in PROMPTS]
MIX = [{"name": "brightness", "weight": 0.25}, {"name": "contrast", "weight": -2.0}]


def judge(
    policy: WanPolicy, mix: RewardMix | None = None, seeds: int = 2, **options: object
) -> EvalScores:
    sampler = tiny_sampler(policy)
    return evaluate(
        policy,
        torch.nn.Identity(),
        HELD,
        seeds,
        mix or RewardMix(MIX),
        sampler.schedule,
        sampler.settings,
        embedding,
        None,
        **({"run_seed": 5, "split": "test", "fps": 8.0} | options),
    )


def videos_of(sampler: RolloutSampler, prompt: Prompt, seeds: int = 2) -> np.ndarray:
    noise = [video_seed(5, "test", prompt, s) for s in range(seeds)]
    finals = sample_ode(
        sampler.policy, noise, sampler.schedule, sampler.settings, embedding(prompt.text)
    )
    return decode(None, finals)


@pytest.fixture(scope="module")
def policy() -> WanPolicy:
    return tiny_policy(moved=0.1)


def test_videos_are_plain_ode_samples_scored_and_weighted(policy: WanPolicy) -> None:
    scores = judge(policy, decode_batch=1)
    assert scores.total.shape == (3, 2) and list(scores.terms) == ["brightness", "contrast"]
    for p, prompt in enumerate(HELD):
        videos = videos_of(tiny_sampler(policy), prompt).astype(np.float64)
        bright, contrast = videos.mean((1, 2, 3, 4)), videos.std((1, 2, 3, 4))
        np.testing.assert_allclose(scores.terms["brightness"][p], bright, rtol=1e-12)
        np.testing.assert_allclose(scores.terms["contrast"][p], contrast, rtol=1e-12)
        np.testing.assert_allclose(scores.total[p], 0.25 * bright - 2 * contrast, rtol=1e-12)
    assert len(set(scores.total.flatten())) == 6


def test_evaluations_repeat_and_policies_are_paired_by_noise() -> None:
    policy = tiny_policy(moved=0.1)
    first = judge(policy)
    sample_all(tiny_sampler(policy), tiny_groups(2))  # training in between draws nothing shared
    torch.manual_seed(77)
    np.testing.assert_array_equal(judge(policy).total, first.total)
    with policy.reference():
        base = judge(policy)
    assert paired_interval(first.total, base.total)[0] != 0
    untrained = tiny_policy()
    np.testing.assert_array_equal(judge(untrained).total, base.total)
    assert (judge(policy, split="validation").total != first.total).all()


def test_the_decode_batch_changes_nothing(policy: WanPolicy) -> None:
    np.testing.assert_array_equal(
        judge(policy, decode_batch=1).total, judge(policy, decode_batch=8).total
    )


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_share_the_prompts(policy: WanPolicy, size: int) -> None:
    whole = judge(policy)
    total = np.zeros((3, 2))
    for rank in range(size):
        part = judge(policy, world=Part(rank, size))
        total += np.nan_to_num(part.total)
        done = ~np.isnan(part.total).any(1)
        np.testing.assert_array_equal(part.total[done], whole.total[done])
    np.testing.assert_array_equal(total, whole.total)


def test_failed_scores_are_masked_never_zero(policy: WanPolicy) -> None:
    whole = judge(policy)
    bright = whole.terms["brightness"]
    limit = float(np.sort(bright.flatten())[2:4].mean())
    terms = [MIX[0] | {"fail_above": limit}, MIX[1]]
    scores = judge(policy, RewardMix(terms, on_nan="mask"))
    failed = bright > limit
    assert failed.sum() == 3
    assert np.isnan(scores.total[failed]).all()
    assert all(np.isnan(term[failed]).all() for term in scores.terms.values())
    np.testing.assert_array_equal(scores.total[~failed], whole.total[~failed])


def test_kept_videos_come_with_their_place_and_reward(policy: WanPolicy) -> None:
    kept: dict[tuple[int, int], tuple[np.ndarray, float]] = {}
    scores = judge(policy, keep=lambda p, s, video, r: kept.__setitem__((p, s), (video, r)))
    assert sorted(kept) == [(p, s) for p in range(3) for s in range(2)]
    for p, prompt in enumerate(HELD):
        videos = videos_of(tiny_sampler(policy), prompt)
        for s in range(2):
            np.testing.assert_array_equal(kept[p, s][0], videos[s])
            assert kept[p, s][1] == pytest.approx(scores.total[p, s])


def test_nothing_held_out_gives_empty_scores(policy: WanPolicy, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(f"{__name__}.HELD", [], raising=True)
    scores = judge(policy)
    assert scores.total.shape == (0, 2)
