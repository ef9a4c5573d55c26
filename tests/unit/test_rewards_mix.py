"""Batches, the weighted mix, and what every reward in the registry promises."""

from __future__ import annotations

import inspect
import json
import logging
import math

import numpy as np
import pytest

from flashgrpo_core.control import Control
from flashgrpo_core.errors import Cancelled, FlashGRPOError
from flashgrpo_core.rewards import REWARDS, RewardMix, VideoBatch, default_terms, option_defaults
from flashgrpo_core.rewards.terms import TERM_KEYS, is_group_wise
from tests.unit._clips import batch, disc, line, noisy, panned

#: Rewards that run without weights, packages or servers of the user.
FREE = [n for n, cls in REWARDS.items() if "no weights" in getattr(cls, "cost", "")]
#: Those that score each video on its own.
SCORED = [name for name in FREE if not is_group_wise(REWARDS[name])]


class Level:
    """Mean grey level over 255; NaN for a video that starts black."""

    name = "level"
    title = description = range = direction = hackable_by = "for tests"

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset
        self.calls: list[int] = []

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        self.calls.append(len(batch))
        means = batch.videos.reshape(len(batch), -1).mean(1) / 255 + self.offset
        means = np.where(batch.videos[:, 0, 0, 0, 0] == 0, np.nan, means)
        return {"level": means, "level.twice": 2 * means}


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.setitem(REWARDS, "level", Level)
    return Level


def greys(*levels: int, fps: float = 8.0) -> VideoBatch:
    return batch(*(np.full((3, 4, 4, 3), v, np.uint8) for v in levels), fps=fps)


# --- batches


def test_select_takes_everything_that_belongs_to_a_video() -> None:
    videos = np.arange(3, dtype=np.uint8)[:, None, None, None, None] * np.ones(
        (1, 2, 4, 4, 3), np.uint8
    )
    image = np.zeros((4, 4, 3), np.uint8)
    whole = VideoBatch(videos, ["a", "b", "c"], 8.0, ["g0", "g1", "g2"], [None, image, None])
    part = whole.select([2, 1])
    assert part.videos[:, 0, 0, 0, 0].tolist() == [2, 1]
    assert (part.prompts, part.group_ids, part.fps) == (["c", "b"], ["g2", "g1"], 8.0)
    assert part.start_images is not None and part.start_images[1] is image
    assert len(whole.select([])) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"videos": np.zeros((2, 3, 4, 4, 3), np.float32)}, "float32"),
        ({"videos": np.zeros((2, 3, 4, 4), np.uint8)}, r"\[2, 3, 4, 4\]"),
        ({"videos": np.zeros((2, 3, 4, 4, 4), np.uint8)}, r"\[2, 3, 4, 4, 4\]"),
        ({"videos": np.zeros((2, 0, 4, 4, 3), np.uint8)}, r"\[2, 0, 4, 4, 3\]"),
        ({"videos": [1, 2]}, "list"),
        ({"prompts": ["a"]}, "1 prompts"),
        ({"prompts": "ab"}, "prompts"),
        ({"prompts": ["a", 3]}, "prompts"),
        ({"group_ids": ["a", "b", "c"]}, "3 group_ids"),
        ({"fps": 0.0}, "fps"),
        ({"fps": math.nan}, "fps"),
        ({"fps": "8"}, "fps"),
        ({"start_images": [None]}, "1 start images"),
        ({"start_images": [None, np.zeros((4, 4), np.uint8)]}, "start image 1"),
    ],
)
def test_a_bad_batch_is_an_error_that_names_it(change: dict, named: str) -> None:
    good = {
        "videos": np.zeros((2, 3, 4, 4, 3), np.uint8),
        "prompts": ["a", "b"],
        "fps": 8.0,
        "group_ids": ["g", "g"],
    }
    VideoBatch(**good)
    with pytest.raises(FlashGRPOError, match=named):
        VideoBatch(**{**good, **change})


# --- the mix


def test_total_is_the_weighted_sum_of_raw_terms(level: type) -> None:
    mix = RewardMix(
        [{"name": "level", "weight": 2.0}, {"name": "brightness", "weight": -0.5, "target": 1.0}]
    )
    scores = mix.score(greys(51, 255))
    assert list(scores.terms) == mix.labels == ["level", "brightness"]
    assert scores.weights == mix.weights == {"level": 2.0, "brightness": -0.5}
    assert scores.terms["level"].tolist() == pytest.approx([0.2, 1.0])
    expected = 2 * scores.terms["level"] - 0.5 * scores.terms["brightness"]
    np.testing.assert_allclose(scores.total, expected, rtol=1e-15)
    assert scores.total.dtype == np.float64 and scores.valid.all()
    assert scores.parts["level.twice"].tolist() == pytest.approx([0.4, 2.0])
    assert set(scores.parts) == {"level", "level.twice", "brightness", "brightness.measured"}


def test_weight_defaults_to_one_and_repeated_names_get_numbers(level: type) -> None:
    mix = RewardMix([{"name": "level"}, {"name": "level", "offset": 1.0}, {"name": "level"}])
    scores = mix.score(greys(51))
    assert scores.weights == {"level": 1.0, "level#2": 1.0, "level#3": 1.0}
    assert scores.terms["level#2"][0] == pytest.approx(1.2)
    assert scores.parts["level#2.twice"][0] == pytest.approx(2.4)
    assert scores.total[0] == pytest.approx(0.2 + 1.2 + 0.2)


def test_equal_terms_are_scored_once(level: type) -> None:
    mix = RewardMix(
        [
            {"name": "level"},
            {"name": "level", "part": "twice", "gate": {"name": "level", "above": 0}},
            {"name": "level", "group": "win_rate"},
        ]
    )
    mix.score(greys(10, 20, 30))
    (only,) = mix.rewards
    assert only.calls == [1, 1, 1]


def test_clip_limits_a_term_and_keeps_the_raw_value(level: type) -> None:
    mix = RewardMix([{"name": "level", "clip": [0.1, 0.5]}])
    scores = mix.score(greys(1, 51, 255))
    assert scores.terms["level"].tolist() == pytest.approx([0.1, 0.2, 0.5])
    assert scores.parts["level.raw"].tolist() == pytest.approx([1 / 255, 0.2, 1.0])
    assert scores.total.tolist() == scores.terms["level"].tolist()


def test_gate_counts_a_term_only_above_or_below_a_threshold(level: type) -> None:
    gate = {"name": "brightness", "target": 1.0, "above": 0.5}
    scores = RewardMix([{"name": "level", "gate": gate}]).score(greys(51, 204))
    assert scores.terms["level"].tolist() == pytest.approx([0.0, 0.8])
    assert scores.parts["level.gate"].tolist() == pytest.approx([0.2, 0.8])
    gate = {"name": "brightness", "target": 1.0, "below": 0.5, "otherwise": -1}
    scores = RewardMix([{"name": "level", "gate": gate}]).score(greys(51, 204))
    assert scores.terms["level"].tolist() == pytest.approx([0.2, -1.0])


def test_a_gate_that_is_not_finite_is_not_a_closed_gate(level: type) -> None:
    mix = RewardMix([{"name": "brightness", "gate": {"name": "level", "above": 0.1}}], "mask")
    scores = mix.score(greys(0, 51))
    assert scores.valid.tolist() == [False, True]


def test_not_finite_is_an_error_that_names_reward_and_video(level: type) -> None:
    with pytest.raises(FlashGRPOError, match="'level' gave nan for video 1, 3 of 4"):
        RewardMix([{"name": "level"}]).score(greys(9, 0, 9, 0))


def test_not_finite_is_masked_and_never_a_number(
    level: type, caplog: pytest.LogCaptureFixture
) -> None:
    mix = RewardMix([{"name": "brightness"}, {"name": "level"}], on_nan="mask")
    with caplog.at_level(logging.WARNING):
        scores = mix.score(greys(9, 0, 9))
    assert scores.valid.tolist() == [True, False, True]
    assert np.isnan(scores.total[1]) and np.isfinite(scores.total[[0, 2]]).all()
    assert np.isnan(scores.terms["level"][1])
    assert "level" in caplog.text and "video 1" in caplog.text


@pytest.mark.parametrize(
    ("result", "named"),
    [
        ({"level": np.zeros(2)}, "expected one per video"),
        ({"level": np.float64(1)}, "expected one per video"),
        ({"other": np.zeros(1)}, "no value named 'level'"),
        ({"level": np.zeros(1), "other": np.zeros(1)}, "'other'"),
        (np.zeros(1), "no value named"),
    ],
)
def test_a_reward_that_breaks_the_contract_is_named(
    level: type, monkeypatch: pytest.MonkeyPatch, result: object, named: str
) -> None:
    monkeypatch.setattr(level, "score", lambda self, batch: result)
    with pytest.raises(FlashGRPOError, match=named) as error:
        RewardMix([{"name": "level"}]).score(greys(9))
    assert "level" in str(error.value)


def test_stop_takes_effect_before_the_next_video(level: type) -> None:
    class Stop(Control):
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks == 3:
                raise Cancelled

    mix = RewardMix([{"name": "level"}])
    with pytest.raises(Cancelled):
        mix.score(greys(9, 9, 9, 9), Stop())
    assert mix.rewards[0].calls == [1, 1]


def test_a_reward_on_whole_batches_gets_them(level: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level, "whole_batch", True, raising=False)
    mix = RewardMix([{"name": "level"}])
    assert mix.score(greys(51, 255)).total.tolist() == pytest.approx([0.2, 1.0])
    assert mix.rewards[0].calls == [2]


def test_an_empty_batch_has_no_scores() -> None:
    mix = RewardMix([{"name": name} for name in FREE])
    scores = mix.score(batch(disc(line())).select([]))
    assert scores.total.shape == scores.valid.shape == (0,)
    assert all(v.shape == (0,) for v in scores.parts.values())


@pytest.mark.parametrize(
    ("terms", "named"),
    [
        ([], "no terms"),
        (["motion"], "'motion'"),
        ([{"weight": 1}], "unknown reward None"),
        ([{"name": "moton"}], "did you mean 'motion'"),
        ([{"name": "motion", "enogh": 1}], "did you mean 'enough'"),
        ([{"name": "motion", "wieght": 1}], "did you mean 'weight'"),
        ([{"name": "motion", "weight": "1"}], "weight = '1'"),
        ([{"name": "motion", "weight": math.inf}], "weight = inf"),
        ([{"name": "motion", "weight": True}], "weight = True"),
        ([{"name": "motion", "clip": [1]}], "clip"),
        ([{"name": "motion", "clip": [1, 0]}], "clip"),
        ([{"name": "motion", "gate": "technical"}], "gate"),
        ([{"name": "motion", "gate": {"name": "technical"}}], "above"),
        ([{"name": "motion", "gate": {"name": "x", "above": 1}}], "unknown reward 'x'"),
        ([{"name": "motion", "gate": {"name": "freeze", "above": "1"}}], "above = '1'"),
        ([{"name": "motion"}, {"name": "motion", "enough": -1}], "enough = -1"),
        ([{"name": "motion", "part": "smoth"}], "no part 'smoth'.*smooth"),
        ([{"name": "motion", "part": 3}], "part = 3"),
        ([{"name": "motion", "group": "best"}], "group = 'best'.*win_rate"),
        ([{"name": "diversity", "group": "win_rate"}], "leave out group"),
        ([{"name": "diversity", "part": "x"}], "leave out part"),
        ([{"name": "motion", "gate": {"name": "diversity", "above": 0}}], "cannot be a gate"),
    ],
)
def test_bad_terms_are_errors_that_name_the_fix(terms: list, named: str) -> None:
    with pytest.raises(FlashGRPOError, match=named) as error:
        RewardMix(terms)
    assert "\n" not in str(error.value)


def test_on_nan_is_checked() -> None:
    with pytest.raises(FlashGRPOError, match="'skip'"):
        RewardMix([{"name": "motion"}], on_nan="skip")


@pytest.mark.parametrize("tiny", [True, False])
def test_default_terms_are_valid(tiny: bool) -> None:
    terms = default_terms(tiny)
    assert RewardMix(terms).labels == [t["name"] for t in terms]
    assert ("tiny_world" in RewardMix(terms).labels) is tiny


def test_default_terms_rank_a_good_video_above_spoiled_ones() -> None:
    good = disc(line())
    videos = [good, np.repeat(good[:1], 9, 0), noisy(good, 30), good[:, ::-1] // 16]
    totals = RewardMix(default_terms(tiny=False)).score(batch(*videos, fps=8.0)).total
    assert totals.argmax() == 0
    assert totals[0] > totals[1:].max() + 0.2


# --- every reward


@pytest.fixture(scope="module")
def mixed_batch() -> VideoBatch:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8).repeat(4, 0).repeat(4, 1)
    videos = [disc(line(5)), panned(picture, 5, 2), noisy(disc(line(5)), 20), disc([(30, 30)] * 5)]
    return batch(*videos, fps=8.0)


@pytest.mark.parametrize("name", list(REWARDS))
def test_every_reward_is_described(name: str) -> None:
    cls = REWARDS[name]
    assert cls.name == name
    for attribute in ("title", "description", "range", "direction", "hackable_by", "cost"):
        # What a model costs depends on the machine; its memory does not.
        text = getattr(cls, attribute, None) or getattr(cls, "memory", None)
        if text is None and getattr(cls, "served", False):
            continue  # what it costs is the business of another process
        assert isinstance(text, str) and len(text) >= 5, attribute
    assert inspect.getdoc(cls)
    defaults = option_defaults(cls)
    given = {k: v for k, v in defaults.items() if v is not inspect.Parameter.empty}
    assert json.loads(json.dumps(given)) == given
    assert not set(defaults) & set(TERM_KEYS)


@pytest.mark.parametrize("name", SCORED)
def test_every_reward_is_deterministic_bounded_and_blind_to_its_neighbours(
    name: str, mixed_batch: VideoBatch
) -> None:
    reward = REWARDS[name]()
    together = reward.score(mixed_batch)
    order = [2, 0, 3, 1]
    permuted = REWARDS[name]().score(mixed_batch.select(order))
    alone = [reward.score(mixed_batch.select([i])) for i in range(4)]
    before = mixed_batch.videos.copy()
    for key, values in together.items():
        assert key == name or key.startswith(name + ".")
        assert values.dtype == np.float64 and values.shape == (4,)
        np.testing.assert_array_equal(values[order], permuted[key])
        np.testing.assert_array_equal(values, [a[key][0] for a in alone])
    assert (together[name] >= 0).all() and (together[name] <= 1).all()
    np.testing.assert_array_equal(before, mixed_batch.videos)


@pytest.mark.parametrize("name", [n for n in SCORED if n != "tiny_world"])
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_every_reward_takes_short_clips(name: str, frames: int) -> None:
    videos = [disc(line(frames)), noisy(disc(line(frames)), 10)]
    values = REWARDS[name]().score(batch(*videos))[name]
    assert np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()
