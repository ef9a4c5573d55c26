"""The motion reward: moving beats still, smooth beats jittery, noise is not motion."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards.motion import MotionReward
from tests.unit import _clips
from tests.unit._clips import (
    batch,
    disc,
    flickering,
    frozen,
    line,
    noisy,
    panned,
    shaken,
    value,
)

MOTION = MotionReward()


def natural() -> np.ndarray:
    """Short, because the flow of a pair takes a twentieth of a second."""
    return _clips.natural()[:11]


def test_speed_is_that_of_the_object() -> None:
    """2.2 pixels a frame at 8 fps on 64 pixels are 0.275 short sides a second."""
    speed = value(MOTION, disc(line()), "speed", fps=8.0)
    assert speed == pytest.approx(2.2 * 8 / 64, rel=0.1)


def test_speed_does_not_depend_on_size_or_frame_rate() -> None:
    slow = value(MOTION, disc(line(9, 1.1)), "speed", fps=16.0)
    fast = value(MOTION, disc(line(9, 2.2)), "speed", fps=8.0)
    assert slow == pytest.approx(fast, rel=0.15)
    large = np.stack([cv2.resize(f, (256, 256)) for f in disc(line())])
    assert value(MOTION, large, "speed", fps=8.0) == pytest.approx(fast, rel=0.15)


def test_a_still_video_scores_zero_and_a_moving_one_does_not() -> None:
    assert value(MOTION, disc([(20, 32)] * 9)) == 0
    assert value(MOTION, frozen(natural())) == 0
    assert value(MOTION, disc(line()), fps=8.0) > 0.4
    assert value(MOTION, natural()) > 0.15


def test_smooth_beats_jittery() -> None:
    rng = np.random.default_rng(0)
    jitter = [
        (x + dx, y + dy)
        for (x, y), (dx, dy) in zip(line(), rng.uniform(-2, 2, (9, 2)), strict=True)
    ]
    smooth_clip, jittery_clip = disc(line()), disc(jitter)
    assert value(MOTION, smooth_clip, "smooth") > 0.9
    assert value(MOTION, jittery_clip, "smooth") < 0.5
    assert value(MOTION, smooth_clip, fps=8.0) > 1.5 * value(MOTION, jittery_clip, fps=8.0)
    assert value(MOTION, smooth_clip, "jitter") < 0.5 * value(MOTION, jittery_clip, "jitter")


def test_a_pan_beats_a_shaking_camera_that_is_as_fast() -> None:
    picture = natural()[0]
    pan, shake = panned(picture, 9, 3), shaken(np.repeat(picture[None], 9, 0), 4)
    assert value(MOTION, pan, "jitter") < 0.3 * value(MOTION, shake, "jitter")
    assert value(MOTION, pan) > 0.8
    assert value(MOTION, shake) < 0.3


def test_to_and_fro_is_the_opposite_of_smooth() -> None:
    clip = disc([(30 + 3 * (t % 2), 32) for t in range(9)])
    assert value(MOTION, clip, "smooth") < 0.1


def test_more_movement_pays_only_up_to_the_cap() -> None:
    speeds = [value(MOTION, disc(line(6, step)), "dynamic", fps=8.0) for step in (1, 2, 3, 5, 7)]
    assert speeds == sorted(speeds)
    assert speeds[0] < 0.4
    assert speeds[-1] == speeds[-2] == 1.0
    generous = MotionReward(enough=2.0)
    assert value(generous, disc(line()), "dynamic", fps=8.0) < 0.2


@pytest.mark.parametrize("spoil", [lambda v: noisy(v, 10), flickering], ids=["noise", "flicker"])
def test_noise_and_flicker_are_not_motion(spoil) -> None:
    assert value(MOTION, spoil(frozen(natural()))) < 0.1
    assert value(MOTION, spoil(frozen(disc(line())))) < 0.1


def test_pure_noise_is_not_motion() -> None:
    video = np.random.default_rng(1).integers(0, 256, (9, 64, 64, 3)).astype(np.uint8)
    assert value(MOTION, video) < 0.15


def test_shuffled_frames_score_less() -> None:
    video = natural()
    order = np.random.default_rng(2).permutation(len(video))
    assert value(MOTION, video[order], "smooth") < 0.7 * value(MOTION, video, "smooth")


def test_one_and_two_frames() -> None:
    assert value(MOTION, disc(line(1))) == 0
    assert value(MOTION, disc(line(2)), "smooth") == 1
    assert value(MOTION, disc(line(2)), fps=8.0) > 0.3


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_very_small_frames_work(size: int) -> None:
    video = np.random.default_rng(3).integers(0, 256, (3, size, size + 1, 3)).astype(np.uint8)
    scores = MOTION.score(batch(video))
    assert all(np.isfinite(v).all() for v in scores.values())
    assert 0 <= scores["motion"][0] <= 1


@pytest.mark.parametrize(
    "options", [{"enough": 0}, {"enough": "much"}, {"short_side": 8}, {"enough": float("nan")}]
)
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(FlashGRPOError, match=next(iter(options))):
        MotionReward(**options)
