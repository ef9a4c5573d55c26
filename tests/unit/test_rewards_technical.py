"""The technical reward and its measures: the right faults, in the right order, hard to fool."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import measures
from flashgrpo_core.rewards.flow import luma
from flashgrpo_core.rewards.technical import STRENGTHS, TechnicalReward
from tests.unit._clips import (
    batch,
    blurred,
    disc,
    flickering,
    frozen,
    jpeg,
    line,
    natural,
    noisy,
    value,
)

TECHNICAL = TechnicalReward()
CLIPS = {"natural": natural, "generated": lambda: disc(line())}


@pytest.fixture(params=CLIPS)
def clip(request: pytest.FixtureRequest) -> np.ndarray:
    return CLIPS[request.param]()


def test_clean_beats_noisy_beats_blurred(clip: np.ndarray) -> None:
    clean = value(TECHNICAL, clip)
    grainy = value(TECHNICAL, noisy(clip, 15))
    soft = value(TECHNICAL, blurred(clip, 5))
    assert clean > 0.75
    assert clean > grainy + 0.1
    assert grainy > soft + 0.1


def test_more_blur_and_more_noise_score_less(clip: np.ndarray) -> None:
    by_blur = [value(TECHNICAL, blurred(clip, s)) for s in (1, 2, 4)]
    by_noise = [value(TECHNICAL, noisy(clip, s)) for s in (5, 15, 30)]
    for scores in (by_blur, by_noise):
        assert value(TECHNICAL, clip) > scores[0] > scores[1] > scores[2]


def test_noise_does_not_hide_blur(clip: np.ndarray) -> None:
    """The published blur effect takes grain for sharpness; noise must not repair a score."""
    soft = blurred(clip, 2)
    assert value(TECHNICAL, noisy(soft, 5), "blur") > 0.75 * value(TECHNICAL, soft, "blur")
    assert value(TECHNICAL, noisy(soft, 5)) < value(TECHNICAL, soft) + 0.05


@pytest.mark.parametrize(
    "spoil",
    [lambda v: v, lambda v: noisy(v, 5), lambda v: flickering(v, 0.9)],
    ids=["as it is", "with grain", "with flicker"],
)
def test_a_frozen_video_stays_frozen_whatever_is_laid_over_it(spoil, clip: np.ndarray) -> None:
    video = spoil(frozen(clip))
    assert value(TECHNICAL, video, "freeze") > 0.7
    assert value(TECHNICAL, video) < 0.4 * value(TECHNICAL, clip)


def test_repeated_frames_count_by_their_share(clip: np.ndarray) -> None:
    halved = clip[np.arange(len(clip)) // 2]
    assert value(TECHNICAL, halved, "freeze") == pytest.approx(0.5, abs=0.1)
    assert value(TECHNICAL, clip, "freeze") < 0.05


def test_flicker_is_found_and_a_fade_is_not(clip: np.ndarray) -> None:
    fade = clip * np.linspace(1, 0.5, len(clip))[:, None, None, None]
    assert value(TECHNICAL, flickering(clip), "flicker") > value(TECHNICAL, clip, "flicker") + 0.3
    faded = value(TECHNICAL, fade.round().astype(np.uint8), "flicker")
    assert faded < value(TECHNICAL, clip, "flicker") + 0.05


def test_clipped_exposure_is_found(clip: np.ndarray) -> None:
    assert value(TECHNICAL, clip, "exposure") == 0
    over = np.clip(clip.astype(np.float64) * 3 + 200, 0, 255).astype(np.uint8)
    under = np.clip(clip.astype(np.float64) - 150, 0, 255).astype(np.uint8)
    assert value(TECHNICAL, over, "exposure") > 0.5
    assert value(TECHNICAL, under, "exposure") > 0.5


def test_a_grid_is_found_wherever_it_lies(clip: np.ndarray) -> None:
    """JPEG at quality 10 leaves blocks of 8; a checkerboard is what some policies fall into."""
    assert value(TECHNICAL, clip, "blocks") == value(TECHNICAL, noisy(clip, 5), "blocks") == 0
    coarse = value(TECHNICAL, jpeg(natural(), 10), "blocks")
    assert coarse > 0.8
    assert value(TECHNICAL, jpeg(natural(), 10)[:, 3:, 5:], "blocks") > 0.8
    assert 0.2 < value(TECHNICAL, jpeg(natural(), 50), "blocks") < coarse
    board = np.indices((16, 16)).sum(0) % 2 * 200
    board = board.repeat(8, 0).repeat(8, 1).astype(np.uint8)[None, ..., None].repeat(3, -1)
    assert value(TECHNICAL, board, "blocks") == 1
    assert value(TECHNICAL, board.repeat(2, 1).repeat(2, 2), "blocks") == 1


@pytest.mark.parametrize("grey", [0, 128, 255])
def test_empty_videos_score_zero(grey: int) -> None:
    assert value(TECHNICAL, np.full((5, 32, 32, 3), grey, np.uint8)) == 0


def test_total_is_the_product_of_what_the_faults_leave(clip: np.ndarray) -> None:
    scores = TECHNICAL.score(batch(flickering(noisy(clip, 5), 0.95)))
    expected = math.prod(1 - s * scores[f"technical.{k}"][0] for k, s in STRENGTHS.items())
    assert scores["technical"][0] == pytest.approx(expected, abs=1e-12)
    assert set(scores) == {"technical", *(f"technical.{k}" for k in STRENGTHS)}


def test_strength_zero_ignores_a_fault(clip: np.ndarray) -> None:
    lenient = TechnicalReward(freeze=0.0, flicker=0.0)
    still = frozen(clip)
    assert value(lenient, still, "freeze") == 1
    assert value(lenient, still) > 4 * value(TECHNICAL, still)


def test_one_frame_neither_flickers_nor_freezes(clip: np.ndarray) -> None:
    assert value(TECHNICAL, clip[:1], "freeze") == value(TECHNICAL, clip[:1], "flicker") == 0
    assert value(TECHNICAL, clip[:1]) > 0.7


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_very_small_frames_work(size: int) -> None:
    video = np.random.default_rng(0).integers(0, 256, (3, size, size + 1, 3)).astype(np.uint8)
    scores = TECHNICAL.score(batch(video))
    assert all(np.isfinite(v).all() for v in scores.values())
    assert 0 <= scores["technical"][0] <= 1


def test_noise_estimate_is_calibrated() -> None:
    """White noise in the luma is estimated within ten percent, in texture within twenty."""
    rng = np.random.default_rng(4)
    for sigma in (3.0, 10.0):
        for ground, tolerance in ((np.full((144, 176), 128.0), 0.1), (luma(natural())[0], 0.2)):
            frame = np.asarray(ground) + rng.normal(0, sigma, (144, 176))
            clean = float(measures.noise(torch.tensor(np.asarray(ground))[None].float()))
            found = float(measures.noise(torch.tensor(frame)[None].float()))
            assert found == pytest.approx(math.hypot(sigma, clean), rel=tolerance)


def test_a_crisp_edge_is_the_sharpest_and_a_ramp_is_all_blur() -> None:
    edge = torch.zeros(1, 48, 48)
    edge[:, :, 24:] = 200
    across = measures._blur_along(edge, 2, torch.zeros(1))
    assert float(across) == pytest.approx(1 / 3, abs=1e-6)
    ramp = torch.linspace(0, 200, 300).expand(1, 300, 300)
    assert float(measures._blur_along(ramp, 2, torch.zeros(1))) > 0.97


@pytest.mark.parametrize("options", [{"blur": 1.5}, {"freeze": -0.1}, {"short_side": "big"}])
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(FlashGRPOError, match=next(iter(options))):
        TechnicalReward(**options)
