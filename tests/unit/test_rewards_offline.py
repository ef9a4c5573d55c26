"""The simple offline rewards: each ranks what it is meant to rank."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards.loop_closure import LoopClosureReward
from flashgrpo_core.rewards.options import AGGREGATES, aggregate, frame_rule
from flashgrpo_core.rewards.picture import (
    BrightnessReward,
    ColourfulnessReward,
    ContrastReward,
    JpegSizeReward,
)
from flashgrpo_core.rewards.temporal import FlickerReward, FreezeReward
from tests.unit._clips import disc, flickering, frozen, line, natural, noisy, value


def _grey(level: int, frames: int = 3) -> np.ndarray:
    return np.full((frames, 16, 16, 3), level, np.uint8)


def _halves(low: int, high: int) -> np.ndarray:
    video = _grey(low)
    video[:, :, 8:] = high
    return video


# --- over time


def test_flicker_measures_the_height_of_the_swing() -> None:
    video = np.concatenate([_grey(100 + 12 * (t % 2), 1) for t in range(7)])
    assert value(FlickerReward(), video, "swing") == pytest.approx(12, abs=1e-3)
    assert value(FlickerReward(tolerance=12), video) == pytest.approx(np.exp(-1), abs=1e-3)


def test_steady_videos_fades_and_smooth_movement_do_not_flicker() -> None:
    fade = np.concatenate([_grey(60 + 10 * t, 1) for t in range(9)])
    assert value(FlickerReward(), fade) == 1
    assert value(FlickerReward(), frozen(natural())) == 1
    assert value(FlickerReward(), disc(line())) > 0.95


def test_flickering_scores_less() -> None:
    assert value(FlickerReward(), flickering(natural())) < 0.3 < value(FlickerReward(), natural())


def test_freeze_counts_pairs_that_do_not_change() -> None:
    video = disc(line())
    assert value(FreezeReward(), frozen(video)) == 0
    assert value(FreezeReward(), video) > 0.99
    stuck = np.concatenate([video[:5], np.repeat(video[4:5], 4, 0)])
    assert value(FreezeReward(), stuck) == pytest.approx(0.5, abs=0.01)
    assert value(FreezeReward(), noisy(frozen(video), 8)) < 0.2


def test_loops_close_and_journeys_do_not() -> None:
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    circle = disc([(32 + 12 * np.cos(a), 32 + 12 * np.sin(a)) for a in angles])
    reward = LoopClosureReward()
    assert value(reward, circle) > 0.8
    assert value(reward, circle[:7]) < 0.4
    assert value(reward, circle) > value(reward, circle[:10]) > value(reward, circle[:8])
    assert value(reward, disc(line(12, 2.0))) < 0.5


def test_a_still_picture_is_no_loop() -> None:
    assert value(LoopClosureReward(), frozen(natural())) == 0
    assert value(LoopClosureReward(), noisy(frozen(natural()), 2)) < 0.5
    assert value(LoopClosureReward(), natural()[:1]) == 0


# --- single frames


@pytest.mark.parametrize(("level", "expected"), [(0, 0.0), (255, 0.0), (51, 0.4), (102, 0.8)])
def test_brightness_is_the_distance_from_the_target(level: int, expected: float) -> None:
    assert value(BrightnessReward(), _grey(level)) == pytest.approx(expected, abs=1e-6)


def test_brightness_target_can_be_moved() -> None:
    assert value(BrightnessReward(target=1.0), _grey(255)) == pytest.approx(1)
    assert value(BrightnessReward(target=1.0), _grey(0)) == pytest.approx(0)
    assert value(BrightnessReward(target=0.2), _grey(51)) == pytest.approx(1, abs=1e-6)
    assert value(BrightnessReward(), _grey(51), "measured") == pytest.approx(0.2)


def test_contrast_runs_from_flat_to_black_and_white() -> None:
    full = ContrastReward(target=1.0)
    assert value(full, _halves(0, 255)) == pytest.approx(1, abs=1e-6)
    assert value(full, _halves(64, 191)) == pytest.approx(127 / 255, abs=1e-4)
    assert value(full, _grey(128)) == 0
    assert value(ContrastReward(), natural()) > value(ContrastReward(), natural() // 8 + 100)


def test_colourfulness_of_grey_is_zero_and_of_pure_colours_one() -> None:
    vivid = _halves(0, 0)
    vivid[:, :, :8, 0] = 255
    vivid[:, :, 8:, 2] = 255
    full = ColourfulnessReward(target=1.0)
    assert value(full, _halves(0, 255)) == 0
    assert value(full, vivid) == 1
    washed = (natural().astype(int) + 3 * natural().mean(-1, keepdims=True)) // 4
    assert value(full, washed.astype(np.uint8)) < value(full, natural()) < 1


def test_jpeg_size_ranks_by_compressibility() -> None:
    order = [np.full_like(natural(), 128), natural(), noisy(natural(), 30)]
    small = [value(JpegSizeReward(), v) for v in order]
    large = [value(JpegSizeReward(mode="incompressible"), v) for v in order]
    assert small == sorted(small, reverse=True) and small[0] > small[1] > small[2]
    np.testing.assert_allclose(np.add(small, large), 1)
    assert value(JpegSizeReward(quality=20), natural()) > small[1]


def test_jpeg_size_is_that_of_the_file() -> None:
    buffer = io.BytesIO()
    Image.fromarray(natural()[0]).save(buffer, format="JPEG", quality=90)
    bits = value(JpegSizeReward(), natural()[:1], "bits_per_pixel")
    assert bits == pytest.approx(8 * buffer.tell() / (144 * 176))


# --- frames to video


def test_aggregates() -> None:
    scores = np.array([5.0, 1, 4, 2, 3, 9, 8, 7, 6, 0])
    found = {how: aggregate(scores, how) for how in AGGREGATES}
    assert found == pytest.approx(
        {
            "mean": 4.5,
            "median": 4.5,
            "min": 0,
            "max": 9,
            "top30": 8,
            "bottom30": 1,
            "first": 5,
            "last": 0,
            "top10": 9,
            "bottom10": 0,
            "q10": 0.9,
            "q25": 2.25,
            "q75": 6.75,
            "q90": 8.1,
        }
    )
    assert scores[0] == 5 and scores[-1] == 0, "the frames keep their order"
    assert aggregate(scores, "top55") == np.mean([9, 8, 7, 6, 5, 4])  # k = round(5.5) = 6
    assert aggregate(scores, "bottom100") == 4.5


def test_every_nth_frame_is_picked_from_the_first_on() -> None:
    video = np.arange(7, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8)
    for every, kept in ((1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (9, [0])):
        assert frame_rule("x", "mean", every).pick(video)[:, 0, 0, 0].tolist() == kept
    half = value(
        BrightnessReward(target=1.0, every=2), np.concatenate([_grey(0, 1), _grey(255, 1)])
    )
    assert half == pytest.approx(0)


@pytest.mark.parametrize("frames", ["top0", "top101", "q", "q-5", "best", None, ["mean"], 3])
def test_unknown_rules_are_named(frames: object) -> None:
    with pytest.raises(FlashGRPOError, match="frames"):
        frame_rule("x", frames)
    with pytest.raises(FlashGRPOError, match="every = 0"):
        frame_rule("x", "mean", 0)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_fractions_of_short_clips_hold_one_frame(frames: int) -> None:
    scores = np.arange(frames, dtype=float)
    assert aggregate(scores, "top30") == frames - 1
    assert aggregate(scores, "bottom30") == 0


def test_unknown_aggregate_is_an_error() -> None:
    with pytest.raises(FlashGRPOError, match="'best'"):
        aggregate(np.zeros(3), "best")


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        (BrightnessReward, {"target": 2}),
        (BrightnessReward, {"frames": "best"}),
        (ContrastReward, {"target": None}),
        (ColourfulnessReward, {"frames": ["mean"]}),
        (JpegSizeReward, {"mode": "small"}),
        (JpegSizeReward, {"quality": 96}),
        (FlickerReward, {"tolerance": 0}),
    ],
)
def test_bad_options_are_named(reward: type, options: dict) -> None:
    with pytest.raises(FlashGRPOError, match=next(iter(options))):
        reward(**options)


def test_the_frames_option_is_used() -> None:
    video = np.concatenate([_grey(0, 1), _grey(128, 1), _grey(255, 1)])
    scores = {how: value(BrightnessReward(frames=how), video) for how in ("min", "max", "first")}
    assert scores["max"] > 0.99 and scores["min"] < 0.01 and scores["first"] < 0.01
