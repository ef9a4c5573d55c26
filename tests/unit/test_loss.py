"""The rectified, clipped loss: weights from the steps taken, and where the clip cuts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.loss import RECTIFICATIONS, policy_loss, rectification_weights
from flashgrpo_core.schedule import SCHEDULES, make_schedule
from flashgrpo_core.sde import inverse_gradient_scales
from tests.unit._digits import assert_digits

VECTORS = json.loads(
    (Path(__file__).parents[1] / "data" / "reference_vectors.json").read_text(encoding="utf-8")
)
REFERENCE = make_schedule("unipc-a", 20, 3.0)


def test_weights_of_the_reference_schedule() -> None:
    weights = rectification_weights(range(10), REFERENCE, (0, 10))
    assert weights.dtype == np.float64
    assert_digits(weights, "1.3381 1.2602 1.1832 1.1072 1.0323 .9585 .8859 .8145 .7444 .6757")
    assert weights[0] / weights[9] == pytest.approx(7.4770 / 3.7754, rel=2e-5)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("steps", "shift"), [(20, 3.0), (12, 5.0), (10, 3.0), (50, 5.0)])
def test_weights_fall_over_the_pool_and_average_one(kind: str, steps: int, shift: float) -> None:
    window = (0, steps // 2)
    weights = rectification_weights(range(*window), make_schedule(kind, steps, shift), window)
    assert (np.diff(weights) < 0).all() and (weights > 0).all()
    np.testing.assert_allclose(weights.mean(), 1.0, rtol=1e-12)
    assert weights.max() > 1.2


def test_pool_weights_do_not_depend_on_what_else_was_drawn() -> None:
    one = rectification_weights([3, 7], REFERENCE, (0, 10))
    many = rectification_weights([7, 7, 0, 3], REFERENCE, (0, 10), counts=[1, 8, 3, 2])
    assert one.tolist() == [many[3], many[0]]


def test_pool_weights_follow_the_window() -> None:
    inverse = inverse_gradient_scales(REFERENCE, (4, 9))
    got = rectification_weights([8, 4, 6], REFERENCE, (4, 9))
    np.testing.assert_allclose(got, inverse[[4, 0, 2]] / inverse.mean(), rtol=1e-14)


def test_update_weights_average_one_over_the_samples() -> None:
    steps, counts = [0, 9, 5, 5], [8, 2, 0, 5]
    inverse = inverse_gradient_scales(REFERENCE, (0, 10))
    weights = rectification_weights(steps, REFERENCE, (0, 10), normaliser="update", counts=counts)
    mean = sum(c * inverse[k] for c, k in zip(counts, steps, strict=True)) / sum(counts)
    np.testing.assert_allclose(weights, inverse[steps] / mean, rtol=1e-14)
    np.testing.assert_allclose(np.average(weights, weights=counts), 1.0, rtol=1e-14)
    equal = rectification_weights(steps, REFERENCE, (0, 10), normaliser="update")
    np.testing.assert_allclose(equal, inverse[steps] / inverse[steps].mean(), rtol=1e-14)
    # Nothing used: finite, because nothing will be weighted.
    nothing = rectification_weights(
        steps, REFERENCE, (0, 10), normaliser="update", counts=[0, 0, 0, 0]
    )
    np.testing.assert_allclose(nothing, equal, rtol=1e-14)


def test_no_rectification_is_weight_one() -> None:
    assert rectification_weights([0, 9], REFERENCE, (0, 10), normaliser="none").tolist() == [1, 1]


def test_the_reference_s_loss_batch() -> None:
    """Three steps, two samples each, weighted by the update's mean, clamped and clipped."""
    batch = VECTORS["loss"]
    steps = [0, 5, 9]
    weights = rectification_weights(
        steps, REFERENCE, (0, 10), normaliser="update", counts=[2, 2, 2]
    )
    inverse = np.array(batch["inverse_lambda"])
    np.testing.assert_allclose(weights, (inverse / inverse.mean())[::2], rtol=2e-5)
    clamp = batch["advantage_clamp"]
    advantages = torch.tensor(batch["advantages"]).clamp(-clamp, clamp)
    new, old = torch.tensor(batch["log_prob_new"]), torch.tensor(batch["log_prob_old"])
    losses, ratios = [], []
    for row, weight in enumerate(weights):
        part = slice(2 * row, 2 * row + 2)
        loss, ratio, _ = policy_loss(
            new[part], old[part], advantages[part], float(weight), batch["clip"]
        )
        losses.append(loss)
        ratios.append(ratio)
    torch.testing.assert_close(torch.cat(ratios), torch.tensor(batch["ratio"]), rtol=1e-5, atol=0)
    assert torch.cat(losses).mean().item() == pytest.approx(batch["loss"], abs=1e-5)


def loss_at(
    log_ratio: float, advantage: float, weight: float = 1.0, clip: float = 1e-3
) -> tuple[float, float, float, bool]:
    """(loss, gradient with respect to the new log-prob, ratio, cut) of one sample."""
    old = torch.tensor([0.8], dtype=torch.float64)
    new = (old + log_ratio).requires_grad_()
    loss, ratio, cut = policy_loss(
        new, old, torch.tensor([advantage], dtype=torch.float64), weight, clip
    )
    loss.sum().backward()
    assert not ratio.requires_grad and not cut.requires_grad
    return loss.item(), new.grad.item(), ratio.item(), bool(cut)


def test_on_policy_loss_is_minus_the_advantage() -> None:
    assert loss_at(0.0, 1.0) == (-1.0, -1.0, 1.0, False)
    for advantage in (-2.0, 0.3):
        loss, gradient, ratio, cut = loss_at(0.0, advantage)
        assert (loss, gradient, ratio, cut) == (-advantage, -advantage, 1.0, False)


@pytest.mark.parametrize("advantage", [-2.0, -0.1, 0.1, 3.0])
@pytest.mark.parametrize("log_ratio", [-0.1, -0.0011, -0.0009, 0.0, 0.0009, 0.0011, 0.1])
def test_the_clip_cuts_exactly_where_stated(log_ratio: float, advantage: float) -> None:
    loss, gradient, ratio, cut = loss_at(log_ratio, advantage)
    assert ratio == pytest.approx(math.exp(log_ratio), rel=1e-12)
    gone = (advantage > 0 and ratio > 1.001) or (advantage < 0 and ratio < 0.999)
    assert cut == gone
    if gone:
        assert gradient == 0.0
        assert loss == pytest.approx(-advantage * (1.001 if advantage > 0 else 0.999), rel=1e-12)
    else:
        assert gradient == pytest.approx(-advantage * ratio, rel=1e-12)
        assert loss == pytest.approx(-advantage * ratio, rel=1e-12)


@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize("log_ratio", [-0.05, -0.0005, 0.0, 0.0005, 0.05])
@pytest.mark.parametrize("weight", [0.2, 1.34, 7.0])
def test_the_weight_multiplies_outside_the_clip(
    log_ratio: float, advantage: float, weight: float
) -> None:
    """The ratio is not rectified: clip and cut are those of weight 1, loss and gradient scale."""
    loss, gradient, ratio, cut = loss_at(log_ratio, advantage, 1.0)
    scaled = loss_at(log_ratio, advantage, weight)
    assert scaled[2:] == (ratio, cut)
    np.testing.assert_allclose(scaled[:2], [weight * loss, weight * gradient], rtol=1e-12)


def test_samples_do_not_mix() -> None:
    old = torch.tensor([0.1, 0.2, 0.3])
    new = torch.tensor([0.1, 0.25, 0.3], requires_grad=True)
    loss, ratio, cut = policy_loss(new, old, torch.tensor([1.0, 1.0, -2.0]), 1.0, 1e-3)
    assert loss.shape == ratio.shape == cut.shape == (3,)
    loss.sum().backward()
    assert new.grad.tolist() == [-1.0, 0.0, 2.0]
    assert cut.tolist() == [False, True, False]


def test_bad_requests_are_named() -> None:
    with pytest.raises(FlashGRPOError, match=f"'batch'.*{', '.join(RECTIFICATIONS)}"):
        rectification_weights([1], REFERENCE, (0, 10), normaliser="batch")
    for normaliser in RECTIFICATIONS:
        with pytest.raises(FlashGRPOError, match=r"SDE step 10 is outside the window \[2, 10\)"):
            rectification_weights([3, 10], REFERENCE, (2, 10), normaliser=normaliser)
    with pytest.raises(FlashGRPOError, match="SDE step 1 is outside"):
        rectification_weights([1], REFERENCE, (2, 10))
