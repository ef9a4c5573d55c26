"""The naturalness reward: photographs first, then noise, then blur; artefacts cost too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards.flow import luma
from flashgrpo_core.rewards.naturalness import NaturalnessReward, features
from tests.unit._clips import batch, blurred, jpeg, natural, noisy, value

NATURALNESS = NaturalnessReward(every=5)


def test_clean_beats_noisy_beats_blurred() -> None:
    clip = natural()
    clean = value(NATURALNESS, clip)
    grainy = value(NATURALNESS, noisy(clip, 15))
    soft = value(NATURALNESS, blurred(clip, 2))
    assert clean > 0.8
    assert clean > grainy + 0.2
    assert grainy > soft + 0.2
    assert soft < 0.1


@pytest.mark.parametrize(
    ("spoil", "steps"), [(noisy, (5, 15, 30)), (blurred, (0.7, 1.5, 3)), (jpeg, (60, 20, 5))]
)
def test_more_of_a_fault_is_further_away(spoil, steps) -> None:
    clip = natural()
    far = [value(NATURALNESS, spoil(clip, step), "distance") for step in steps]
    assert value(NATURALNESS, clip, "distance") < far[0] < far[1] < far[2]


def test_noise_and_emptiness_are_nothing_like_a_photograph() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3)).astype(np.uint8)
    assert value(NATURALNESS, noise) < 0.1
    assert value(NATURALNESS, np.full((2, 64, 64, 3), 90, np.uint8)) < 0.01
    assert value(NATURALNESS, np.zeros((2, 15, 40, 3), np.uint8), "distance") == 20


def test_features_are_what_they_are_called() -> None:
    """White Gaussian noise: shape 2, independent pixels but for the local mean that is taken off."""
    rng = np.random.default_rng(1)
    noise = torch.tensor(128 + 40 * rng.normal(size=(256, 256))).float()
    shape, log_variance, near, across, far = features(noise)[:5].tolist()
    assert shape > 1.8
    # The window takes off a weighted mean; by the weights of its 7x7 kernel the neighbours'
    # correlation is then negative and falls with distance.
    assert near < across < 0 and abs(far) < abs(near) < 0.3
    smooth = features(torch.tensor(natural()[0]).float().mean(-1))
    assert smooth[2] > near, "pixels of a photograph resemble their neighbours"
    scaled = features(luma(natural()[:1])[0] * 0.8)
    np.testing.assert_allclose(
        scaled[[0, 2, 3]], features(luma(natural()[:1])[0])[[0, 2, 3]], atol=0.15
    )
    assert np.isfinite(log_variance)


def test_the_mean_of_the_distances_is_reported_and_scores_follow_it() -> None:
    scores = NaturalnessReward(every=1, tolerance=2.0).score(
        batch(natural()[:1], noisy(natural()[:1], 9))
    )
    expected = np.exp(-np.maximum(scores["naturalness.distance"] - 1, 0) / 2)
    np.testing.assert_allclose(scores["naturalness"], expected, rtol=1e-12)


@pytest.mark.parametrize("options", [{"tolerance": 0}, {"frames": "best"}, {"every": 0}])
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(FlashGRPOError, match=next(iter(options))):
        NaturalnessReward(**options)
