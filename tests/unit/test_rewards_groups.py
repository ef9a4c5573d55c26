"""Rewards that compare the videos of a group: win rate and diversity, alone and in the mix."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from flashgrpo_core.build import build_eval_reward
from flashgrpo_core.config import Config
from flashgrpo_core.distributed import World
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.groups import make_groups
from flashgrpo_core.rewards import REWARDS, RewardMix, VideoBatch
from flashgrpo_core.rewards.diversity import DiversityReward
from flashgrpo_core.rewards.mix import win_rate
from flashgrpo_core.scoring import Scores, gather_scores
from tests.unit._clips import disc, line, noisy


class Level:
    """Mean grey level over 255; NaN for a video that starts black."""

    name = "level"

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        means = batch.videos.reshape(len(batch), -1).mean(1) / 255
        return {"level": np.where(batch.videos[:, 0, 0, 0, 0] == 0, np.nan, means)}


@pytest.fixture(autouse=True)
def level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARDS, "level", Level)


def greys(*levels: int, groups: str = "") -> VideoBatch:
    """Grey videos; `groups` names the group of each, one letter a video."""
    videos = np.stack([np.full((3, 8, 8, 3), v, np.uint8) for v in levels])
    return VideoBatch(videos, [""] * len(levels), 8.0, list(groups or "a" * len(levels)))


# --- win rate


def test_win_rate_is_the_share_of_the_others_that_are_beaten() -> None:
    assert win_rate(np.array([3.0, 1.0, 2.0])).tolist() == [1.0, 0.0, 0.5]
    assert win_rate(np.array([5.0, 5.0])).tolist() == [0.5, 0.5]
    assert win_rate(np.array([1.0, 2.0, 2.0, 9.0])).tolist() == pytest.approx([0, 0.5, 0.5, 1])
    assert win_rate(np.array([7.0])).tolist() == [0.5]
    assert win_rate(np.array([])).shape == (0,)


def test_win_rate_depends_on_the_order_only() -> None:
    values = np.random.default_rng(0).normal(size=9)
    np.testing.assert_array_equal(win_rate(values), win_rate(np.exp(5 * values)))
    np.testing.assert_allclose(win_rate(values) + win_rate(-values), 1)
    assert win_rate(values).mean() == pytest.approx(0.5)


def test_win_rates_are_taken_inside_each_group() -> None:
    mix = RewardMix([{"name": "level", "group": "win_rate", "weight": 2.0}])
    scores = mix.score(greys(10, 200, 20, 100, groups="abab"))
    assert mix.labels == ["level.win_rate"]
    assert scores.terms["level.win_rate"].tolist() == [0, 1, 1, 0]
    assert scores.total.tolist() == [0, 2, 2, 0]
    assert scores.compared["level"].tolist() == pytest.approx([v / 255 for v in (10, 200, 20, 100)])


def test_a_win_rate_compares_what_clip_and_gate_have_left() -> None:
    gate = {"name": "brightness", "target": 1.0, "above": 0.5, "otherwise": -1.0}
    table = {"name": "level", "group": "win_rate", "clip": [0, 0.8], "gate": gate}
    scores = RewardMix([table]).score(greys(60, 230, 250))
    assert scores.compared["level"].tolist() == pytest.approx([-1, 0.8, 0.8])
    assert scores.terms["level.win_rate"].tolist() == [0, 0.75, 0.75]


def test_a_masked_video_takes_no_part() -> None:
    terms = [{"name": "level", "group": "win_rate"}, {"name": "diversity"}]
    masked = RewardMix(terms, "mask").score(greys(30, 0, 90, 200))
    alone = RewardMix(terms).score(greys(30, 90, 200))
    assert masked.valid.tolist() == [True, False, True, True]
    assert np.isnan(masked.total[1]) and np.isnan(masked.terms["diversity"][1])
    for label, values in alone.terms.items():
        np.testing.assert_array_equal(masked.terms[label][[0, 2, 3]], values)


# --- diversity


def test_equal_videos_have_no_diversity_and_others_some() -> None:
    reward = DiversityReward()

    def of(*videos: np.ndarray) -> np.ndarray:
        batch = VideoBatch(np.stack(videos), [""] * len(videos), 8.0, ["g"] * len(videos))
        return reward.compare(reward.features(batch))

    clip = disc(line())
    assert of(clip, clip, clip).tolist() == [0, 0, 0]
    assert of(clip).tolist() == [0]
    odd = of(clip, clip, clip[:, :, ::-1])
    assert odd[2] > odd[0] == odd[1] > 0.05
    assert (odd <= 1).all()
    backwards = of(clip, clip[::-1])
    assert backwards[0] == backwards[1] > 0.05, "the same places at other times are not the same"
    grain = of(clip, noisy(clip, 3))
    assert grain[0] < 0.5 * backwards[0], "a little grain is no diversity"


def test_diversity_is_blind_to_the_order_and_to_other_groups() -> None:
    rng = np.random.default_rng(3)
    videos = rng.integers(0, 256, (6, 3, 8, 8, 3)).astype(np.uint8)
    videos[:3] //= 4
    mix = RewardMix([{"name": "diversity"}])
    whole = VideoBatch(videos, [""] * 6, 8.0, list("ababab"))
    total = mix.score(whole).total
    order = [3, 0, 5, 1, 4, 2]
    np.testing.assert_allclose(mix.score(whole.select(order)).total, total[order], rtol=1e-12)
    np.testing.assert_allclose(mix.score(whole.select([0, 2, 4])).total, total[[0, 2, 4]])


@pytest.mark.parametrize(("frames", "size"), [(1, 8), (2, 1), (7, 3), (4, 13)])
def test_any_size_has_features(frames: int, size: int) -> None:
    videos = np.zeros((2, frames, size, size + 1, 3), np.uint8)
    found = DiversityReward().features(VideoBatch(videos, ["", ""], 8.0, ["g", "g"]))
    assert found.shape == (2, DiversityReward.feature_size) and np.isfinite(found).all()


def test_a_gate_keeps_broken_videos_from_being_diverse() -> None:
    gate = {"name": "level", "above": 0.1, "otherwise": -0.5}
    scores = RewardMix([{"name": "diversity", "gate": gate}]).score(greys(2, 100, 200))
    assert scores.terms["diversity"][0] == -0.5 and (scores.terms["diversity"][1:] > 0).all()
    assert scores.parts["diversity.raw"][0] > 0
    clipped = RewardMix([{"name": "diversity", "clip": [0, 0.01]}]).score(greys(2, 100, 200))
    assert clipped.terms["diversity"].tolist() == [0.01] * 3


# --- in the mix


def test_a_part_of_a_reward_is_a_term_of_its_own() -> None:
    clip = disc(line())
    batch = VideoBatch(np.stack([clip, clip[::2].repeat(2, 0)[:9]]), ["", ""], 8.0, ["g", "g"])
    mix = RewardMix([{"name": "motion"}, {"name": "motion", "part": "smooth", "weight": 0.5}])
    scores = mix.score(batch)
    assert mix.labels == ["motion", "motion.smooth"] and len(mix.rewards) == 1
    alone = REWARDS["motion"]().score(batch)
    for label, values in scores.terms.items():
        np.testing.assert_array_equal(values, alone[label])
    assert scores.total.tolist() == pytest.approx(
        (alone["motion"] + 0.5 * alone["motion.smooth"]).tolist()
    )
    gate = {"name": "motion", "part": "speed", "above": 100}
    assert RewardMix([{"name": "level", "gate": gate}]).score(batch).total.tolist() == [0, 0]


def test_a_part_that_a_reward_does_not_report_is_named() -> None:
    with pytest.raises(FlashGRPOError, match="'level' has no part 'dark': it has none"):
        RewardMix([{"name": "level", "part": "dark"}]).score(greys(9))


def test_a_reward_gets_the_host_when_it_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def score(self, batch, control):  # noqa: ANN001, ANN202
        given.append(control)
        return {"level": np.ones(len(batch))}

    monkeypatch.setattr(Level, "score", score)
    host = object.__new__(_Host)
    RewardMix([{"name": "level"}]).score(greys(9), host)
    assert given == [host]


class _Host:
    def check(self) -> None: ...


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"features": lambda self, batch: np.zeros((len(batch), 3))}, r"features \[1, 3\]"),
        ({"compare": lambda self, features: np.zeros(1)}, r"compared 2 videos"),
        ({"compare": lambda self, features: np.full(len(features), np.nan)}, "finite"),
    ],
)
def test_a_group_wise_reward_that_breaks_its_contract_is_named(
    monkeypatch: pytest.MonkeyPatch, change: dict, named: str
) -> None:
    for name, function in change.items():
        monkeypatch.setattr(DiversityReward, name, function)
    with pytest.raises(FlashGRPOError, match=named) as error:
        RewardMix([{"name": "diversity"}]).score(greys(1, 2))
    assert "diversity" in str(error.value)


def test_the_group_of_a_term_is_that_of_the_update() -> None:
    """The ids that the trainer gives its groups are what is compared inside."""
    groups = make_groups(["one", "two"], iteration=1, run_seed=0, group_size=2, window=(0, 3))
    ids = [group.group_id for group in groups for _ in range(2)]
    batch = greys(10, 20, 200, 100)
    batch = VideoBatch(batch.videos, batch.prompts, 8.0, ids)
    mix = RewardMix([{"name": "level", "group": "win_rate"}])
    assert mix.score(batch).total.tolist() == [0, 1, 1, 0]


class Threads(World):
    """Ranks in threads, which add up their arrays as all-reduce does."""

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list) -> None:
        super().__init__(rank, len(shared))
        self.barrier, self.shared = barrier, shared

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        self.shared[self.rank] = array
        self.barrier.wait(timeout=30)
        return np.sum(self.shared, axis=0)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_groups_are_compared_after_the_gather(size: int) -> None:
    """Micro-batches of one group lie on several ranks, and some ranks have none."""
    groups = make_groups(["one", "two"], iteration=1, run_seed=0, group_size=4, window=(0, 3))
    rng = np.random.default_rng(8)
    videos = rng.integers(1, 256, (2, 4, 3, 8, 8, 3)).astype(np.uint8)
    videos[0] //= 3
    videos[1, 2] = 0  # its score fails
    gate = {"name": "brightness", "above": 0.3}
    mix = RewardMix(
        [{"name": "level", "group": "win_rate"}, {"name": "diversity", "gate": gate}]
        + [{"name": "contrast", "weight": 0.5}],
        "mask",
    )
    shares = [(p, range(s, s + 2)) for p in range(2) for s in (0, 2)]

    def work(world: World) -> Scores:
        pieces = []
        for p, samples in world.deal(shares):
            part = videos[p, samples.start : samples.stop]
            ids = [groups[p].group_id] * 2
            rollout = SimpleNamespace(group=groups[p], samples=samples)
            pieces.append((rollout, mix.measure(VideoBatch(part, ids, 8.0, ids))))
        return gather_scores(groups, pieces, mix, world)

    barrier, shared = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(work, [Threads(r, barrier, shared) for r in range(size)]))
    ids = np.repeat([g.group_id for g in groups], 4).tolist()
    whole = mix.score(VideoBatch(videos.reshape(8, 3, 8, 8, 3), ids, 8.0, ids))
    for scores in found:
        np.testing.assert_array_equal(scores.total, whole.total.reshape(2, 4))
        assert scores.valid.tolist() == [[True] * 4, [True, True, False, True]]
        for label, values in whole.terms.items():
            np.testing.assert_array_equal(scores.terms[label], values.reshape(2, 4))
        np.testing.assert_array_equal(
            scores.compared["level"], whole.compared["level"].reshape(2, 4)
        )


def test_prompts_that_a_reward_cannot_score_are_found_before_training() -> None:
    mix = RewardMix([{"name": "level"}, {"name": "tiny_world"}])
    mix.check_prompts(["a red circle moving left"])
    with pytest.raises(FlashGRPOError, match="'a dog' names no colour"):
        mix.check_prompts(["a red circle moving left", "a dog"])


def test_evaluations_judge_the_values_behind_a_win_rate() -> None:
    config = Config()
    config.model.transformer = "tiny"
    config.reward.terms = [{"name": "technical", "group": "win_rate"}, {"name": "diversity"}]
    assert build_eval_reward(config).labels == ["technical", "diversity"]
    config.eval.terms = [{"name": "technical", "group": "win_rate"}]
    with pytest.raises(FlashGRPOError, match="eval.terms has a win rate"):
        build_eval_reward(config)
