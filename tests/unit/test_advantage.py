"""Group-relative advantages against plain NumPy written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgrpo_core.advantage import ADVANTAGE_STDS, check_masked, compute_advantages
from flashgrpo_core.errors import FlashGRPOError

DELTA = 1e-4
REWARDS = (
    np.random.default_rng(3).normal(size=(5, 6)) * np.array([[1], [0.1], [3], [0.5], [2]])
    + (np.arange(5)[:, None])
)


def by_hand(rewards: np.ndarray, std: str) -> np.ndarray:
    """Advantages of complete groups before the clamp."""
    centred = rewards - rewards.mean(1, keepdims=True)
    groups, size = rewards.shape
    per_group = np.array([math.sqrt((row**2).sum() / (size - 1)) for row in centred])
    divisor = {
        "group": per_group[:, None],
        "max_group": per_group.max(),
        # Every group spends one degree of freedom on its own mean.
        "update": math.sqrt((centred**2).sum() / (groups * (size - 1))),
        "raw_update": rewards.flatten().std(ddof=1),
        "none": 1 - DELTA,
    }[std]
    return centred / (divisor + DELTA)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("std", ADVANTAGE_STDS)
def test_all_divisors(std: str, normalise: bool) -> None:
    got = compute_advantages({"a": REWARDS}, {"a": 1.0}, std=std, clamp=100.0, normalise=normalise)
    np.testing.assert_allclose(got.values, by_hand(REWARDS, std), rtol=1e-12)
    assert got.used.all() and not got.zero_variance.any() and not got.too_few.any()
    assert got.values.dtype == np.float64 and not got.no_signal


def test_divisors_differ_from_each_other() -> None:
    values = [compute_advantages({"a": REWARDS}, {"a": 1.0}, std=s).values for s in ADVANTAGE_STDS]
    for i in range(len(values)):
        for j in range(i):
            assert not np.allclose(values[i], values[j], rtol=1e-2)


@pytest.mark.parametrize("std", ADVANTAGE_STDS)
def test_the_reported_divisor(std: str) -> None:
    got = compute_advantages({"a": REWARDS}, {"a": 1.0}, std=std)
    centred = REWARDS - REWARDS.mean(1, keepdims=True)
    np.testing.assert_allclose(got.std, (centred / by_hand(REWARDS, std)).mean(1).mean(), rtol=1e-9)


def test_the_raw_std_counts_how_prompts_differ_and_the_default_does_not() -> None:
    shifted = REWARDS + 100 * np.arange(5)[:, None]
    same = {s: compute_advantages({"a": REWARDS}, {"a": 1.0}, std=s).values for s in ADVANTAGE_STDS}
    moved = {s: compute_advantages({"a": shifted}, {"a": 1.0}, std=s).values for s in same}
    for s in ("update", "group", "max_group", "none"):
        np.testing.assert_allclose(moved[s], same[s], rtol=1e-9, atol=1e-12)
    assert np.abs(moved["raw_update"]).max() < 0.1 * np.abs(same["raw_update"]).max()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 50.0), (0.4, 0.9)])
def test_two_samples_give_plus_minus_0_707(low: float, high: float) -> None:
    got = compute_advantages({"a": np.array([[low, high]])}, {"a": 1.0}, std="group")
    np.testing.assert_allclose(got.values, [[-math.sqrt(0.5), math.sqrt(0.5)]], rtol=5e-4)


def test_clamp() -> None:
    rewards = np.zeros((2, 64))
    rewards[0, 0], rewards[1, 5] = 1.0, -1.0
    raw = by_hand(rewards, "group")
    assert raw.max() > 5 and raw.min() < -5
    for clamp in (5.0, 2.0):
        got = compute_advantages({"a": rewards}, {"a": 1.0}, std="group", clamp=clamp).values
        assert got[0, 0] == clamp and got[1, 5] == -clamp
        np.testing.assert_allclose(got, np.clip(raw, -clamp, clamp), rtol=1e-12)


# Several terms.


def test_terms_are_standardised_one_by_one() -> None:
    other = np.random.default_rng(4).normal(size=REWARDS.shape)
    got = compute_advantages({"a": REWARDS, "b": other}, {"a": 3.0, "b": -1.0}, clamp=100.0)
    wanted = (3 * by_hand(REWARDS, "update") - by_hand(other, "update")) / 4
    np.testing.assert_allclose(got.values, wanted, rtol=1e-12)


def test_the_linear_scale_of_a_term_cancels() -> None:
    other = np.random.default_rng(4).normal(size=REWARDS.shape)
    weights = {"a": 1.0, "b": 0.5}
    plain = compute_advantages({"a": REWARDS, "b": other}, weights).values
    scaled = compute_advantages({"a": 1000 * REWARDS + 7, "b": other}, weights).values
    np.testing.assert_allclose(scaled, plain, rtol=1e-3, atol=1e-3)
    # Without normalisation the large term takes over.
    raw = compute_advantages({"a": 1000 * REWARDS, "b": other}, weights, normalise=False).values
    np.testing.assert_allclose(raw, by_hand(REWARDS, "update"), rtol=0.05, atol=0.02)
    assert np.abs(raw - plain).max() > 0.3


def test_weights_act_between_terms_only() -> None:
    other = np.random.default_rng(4).normal(size=REWARDS.shape)
    terms = {"a": REWARDS, "b": other}
    one = compute_advantages(terms, {"a": 1.0, "b": 0.25}).values
    np.testing.assert_allclose(compute_advantages(terms, {"a": 40.0, "b": 10.0}).values, one)
    assert np.abs(compute_advantages(terms, {"a": 1.0, "b": 1.0}).values - one).max() > 0.1
    single = compute_advantages({"a": REWARDS}, {"a": 1.0}).values
    np.testing.assert_allclose(compute_advantages({"a": REWARDS}, {"a": 1e-3}).values, single)
    np.testing.assert_allclose(compute_advantages(terms, {"a": 1.0, "b": 0.0}).values, single)


def test_a_negative_weight_turns_the_sign() -> None:
    plus = compute_advantages({"a": REWARDS}, {"a": 2.0}).values
    np.testing.assert_allclose(compute_advantages({"a": REWARDS}, {"a": -2.0}).values, -plus)


def test_without_normalisation_the_weighted_sum_is_standardised() -> None:
    other = np.random.default_rng(4).normal(size=REWARDS.shape)
    got = compute_advantages(
        {"a": REWARDS, "b": other}, {"a": 0.5, "b": 2.0}, normalise=False, clamp=100.0
    )
    np.testing.assert_allclose(got.values, by_hand(0.5 * REWARDS + 2 * other, "update"), rtol=1e-12)


# Masks and groups without signal.


@pytest.mark.parametrize("std", ADVANTAGE_STDS)
def test_masked_samples_leave_every_statistic(std: str) -> None:
    valid = np.ones(REWARDS.shape, bool)
    valid[0, 1] = valid[2, 4] = valid[2, 0] = False
    poisoned = np.where(valid, REWARDS, np.nan)
    got = compute_advantages({"a": poisoned}, {"a": 1.0}, valid, std=std, clamp=100.0)
    rows = [REWARDS[p][valid[p]] for p in range(5)]
    centred = [row - row.mean() for row in rows]
    stds = np.array([row.std(ddof=1) for row in rows])
    divisor = {
        "group": stds,
        "max_group": np.full(5, stds.max()),
        "update": np.full(
            5,
            math.sqrt(sum((row**2).sum() for row in centred) / sum(len(row) - 1 for row in rows)),
        ),
        "raw_update": np.full(5, np.concatenate(rows).std(ddof=1)),
        "none": np.full(5, 1 - DELTA),
    }[std]
    for p in range(5):
        np.testing.assert_allclose(
            got.values[p][valid[p]], centred[p] / (divisor[p] + DELTA), rtol=1e-12
        )
    assert (got.values[~valid] == 0).all()
    np.testing.assert_array_equal(got.used, valid)


def test_groups_with_equal_rewards_are_skipped_and_counted() -> None:
    rewards = REWARDS.copy()
    rewards[1] = 0.3  # 0.3 - mean is not exactly zero in binary
    got = compute_advantages({"a": rewards}, {"a": 1.0}, std="group")
    assert got.zero_variance.tolist() == [False, True, False, False, False]
    assert not got.used[1].any() and (got.values[1] == 0).all()
    assert got.used[[0, 2, 3, 4]].all()


def test_a_tiny_but_real_spread_is_not_zero_variance() -> None:
    got = compute_advantages({"a": np.array([[1.0, 1.0 + 1e-6], [0.0, 1.0]])}, {"a": 1.0})
    assert not got.zero_variance.any() and got.used.all()


def test_one_term_that_varies_is_enough() -> None:
    flat = np.full(REWARDS.shape, 2.0)
    for terms in ({"a": flat, "b": REWARDS}, {"a": REWARDS, "b": flat}):
        got = compute_advantages(terms, {"a": 1.0, "b": 1.0}, clamp=100.0)
        assert got.used.all()
        np.testing.assert_allclose(got.values, by_hand(REWARDS, "update") / 2, rtol=1e-12)
    # A term without weight does not count.
    got = compute_advantages({"a": flat, "b": REWARDS}, {"a": 1.0, "b": 0.0})
    assert got.zero_variance.all() and got.no_signal


def test_terms_that_cancel_leave_no_signal_without_normalisation() -> None:
    got = compute_advantages({"a": REWARDS, "b": -REWARDS}, {"a": 1.0, "b": 1.0}, normalise=False)
    assert got.zero_variance.all() and got.no_signal


def test_groups_with_fewer_than_two_valid_samples_are_skipped_and_told_apart() -> None:
    valid = np.ones(REWARDS.shape, bool)
    valid[1, 1:] = False
    valid[3] = False
    got = compute_advantages({"a": np.where(valid, REWARDS, np.nan)}, {"a": 1.0}, valid)
    assert got.too_few.tolist() == [False, True, False, True, False]
    assert not got.zero_variance.any()
    assert got.used.sum(1).tolist() == [6, 0, 6, 0, 6]
    whole = compute_advantages({"a": REWARDS[[0, 2, 4]]}, {"a": 1.0}).values
    np.testing.assert_allclose(got.values[[0, 2, 4]], whole, rtol=1e-12)


@pytest.mark.parametrize("std", ADVANTAGE_STDS)
@pytest.mark.parametrize("normalise", [True, False])
def test_nothing_valid_is_no_signal_and_no_nan(std: str, normalise: bool) -> None:
    valid = np.zeros((3, 4), bool)
    got = compute_advantages(
        {"a": np.full((3, 4), np.nan)}, {"a": 1.0}, valid, std=std, normalise=normalise
    )
    assert got.no_signal and got.too_few.all()
    assert (got.values == 0).all() and np.isfinite(got.std)


@given(
    rewards=st.lists(
        st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5
    ),
    std=st.sampled_from(ADVANTAGE_STDS),
    normalise=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_any_rewards(rewards: list[list[float]], std: str, normalise: bool) -> None:
    array = np.array(rewards)
    got = compute_advantages({"a": array}, {"a": 1.0}, std=std, normalise=normalise)
    assert np.isfinite(got.values).all() and np.abs(got.values).max() <= 5.0
    assert (got.values[~got.used] == 0).all()
    unclamped = compute_advantages({"a": array}, {"a": 1.0}, std=std, clamp=1e12).values
    np.testing.assert_allclose(unclamped.sum(1), 0.0, atol=1e-6)
    # A better reward never gets a smaller advantage.
    for row, values, used in zip(array, got.values, got.used[:, 0], strict=True):
        if used:
            assert (np.diff(values[np.argsort(row)]) >= 0).all()


def test_bad_requests_are_named() -> None:
    with pytest.raises(FlashGRPOError, match="no reward term"):
        compute_advantages({}, {})
    with pytest.raises(FlashGRPOError, match="'batch'.*update, group, max_group, none, raw_update"):
        compute_advantages({"a": REWARDS}, {"a": 1.0}, std="batch")


@pytest.mark.parametrize(
    ("shape", "masked", "least", "reason"),
    [
        ((6, 8), 0, 2, None),
        ((5, 8), 4, 2, None),  # exactly a tenth
        ((5, 8), 5, 2, "5 of 40 videos have no score, at most 10% may be left out"),
        ((20, 2), 1, 2, "group 1 has 1 scored videos left of 2, it needs 2"),
        ((20, 1), 1, 0, None),  # an evaluation: no groups
        ((2, 4), 8, 0, "8 of 8"),
    ],
)
def test_what_failed_scores_may_leave_over(
    shape: tuple[int, int], masked: int, least: int, reason: str | None
) -> None:
    valid = np.ones(shape, bool)
    # Spread over the groups, so that only the share decides where both could.
    order = np.arange(valid.size).reshape(shape).T.ravel()
    valid.flat[order[:masked]] = False
    if reason is None:
        check_masked(valid, least)
    else:
        with pytest.raises(FlashGRPOError, match=reason):
            check_masked(valid, least)
