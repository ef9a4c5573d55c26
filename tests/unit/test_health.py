"""Health signs on synthetic runs: each fires on its fault, none on runs that are well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgrpo_core.health import QUIET, WINDOW, Health

Value = Callable[[int], float]


def record(iteration: int, reward: float, **fields: Any) -> dict[str, Any]:
    terms = fields.pop("terms", {})
    return {
        "event": "iteration",
        "iteration": iteration,
        "reward": {"mean": reward, "terms": terms},
        "kl": 0.0,
        "clip_fraction": 0.0,
        "grad_norm": 1e-3,
        "groups": 8,
        "zero_variance_groups": 0,
    } | fields


def evaluation(iteration: int, reward: float, half_width: float = 0.02) -> dict[str, Any]:
    return {
        "event": "evaluation",
        "split": "validation",
        "iteration": iteration,
        "reward_mean": reward,
        "ci_low": -half_width,
        "ci_high": half_width,
    }


def signs(records: list[dict[str, Any]], **weights: float) -> list[tuple[int, str]]:
    health = Health(weights)
    return [(r["iteration"], sign.code) for r in records for sign in health.observe(r)]


def series(count: int, reward: Value, **fields: Value) -> list[dict[str, Any]]:
    return [
        record(i, reward(i), **{name: value(i) for name, value in fields.items()})
        for i in range(1, count + 1)
    ]


def test_healthy_runs_are_left_alone() -> None:
    """Of 120 runs of 100 iterations that learn or stand still under noise, one may be warned."""
    warned = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        gain = rng.choice([0.0, 0.3, 2.0])
        noise = rng.normal(0, 0.1, (101, 3))
        records = []
        for i in range(1, 101):
            terms = {"a": gain * i / 100 + noise[i, 1], "b": 0.5 + noise[i, 2]}
            total = 5 + gain * min(i, 60) / 60 + noise[i, 0]
            kl, clip = 0.01 * rng.random(), 0.3 * rng.random()
            grad = 1e-3 * float(np.exp(rng.normal(0, 0.5)))
            records.append(record(i, total, terms=terms, kl=kl, clip_fraction=clip, grad_norm=grad))
            if i % 10 == 0:
                records.append(evaluation(i, 5 + gain * min(i, 60) / 60 + rng.normal(0, 0.01)))
        warned += bool(signs(records, a=1.0, b=1.0))
    assert warned <= 1


def test_a_collapse_is_named_with_its_numbers_and_only_once_in_a_while() -> None:
    rng = np.random.default_rng(0)
    health = Health({})
    seen = []
    for i in range(1, 81):
        reward = (0.2 + 0.01 * i if i <= 30 else 0.5 - 0.03 * (i - 30)) + rng.normal(0, 0.01)
        seen += [(i, s) for s in health.observe(record(i, reward))]
    assert {s.code for _, s in seen} == {"reward_collapse"}
    assert 38 <= seen[0][0] <= 48
    assert seen[1][0] - seen[0][0] == QUIET
    assert "fell from 0.4" in seen[0][1].message and "optim.learning_rate" in seen[0][1].message


def test_a_small_dip_after_a_large_gain_is_no_collapse() -> None:
    assert not signs(series(60, lambda i: min(0.9, 0.2 + 0.03 * i) - 0.0005 * max(0, i - 30)))


def test_a_falling_term_under_a_rising_reward_is_hacking() -> None:
    rng = np.random.default_rng(1)
    records = [
        record(i, 0.01 * i + rng.normal(0, 0.01), terms={"motion": 1 - 0.02 * i, "blur": 0.02 * i})
        for i in range(1, 41)
    ]
    assert signs(records, motion=0.5)[0][1] == "reward_hacking"
    assert signs(records, motion=0.0)[0][1] == "reward_hacking"  # measured only: a second opinion
    assert not signs(records, motion=-1.0)  # a penalty is meant to fall
    assert signs(records, blur=-1.0)[0][1] == "reward_hacking"
    assert not signs(records, other=1.0)


def test_a_falling_held_out_reward_under_a_rising_one_is_hacking() -> None:
    rng = np.random.default_rng(2)
    held = {10: 0.5, 20: 0.6, 30: 0.59, 40: 0.5}
    records = []
    for i in range(1, 41):
        records.append(record(i, 0.01 * i + rng.normal(0, 0.01)))
        if i in held:
            records.append(evaluation(i, held[i]))
    assert signs(records) == [(40, "reward_hacking")]
    flat = [r | {"reward": {"mean": 0.5, "terms": {}}} if "reward" in r else r for r in records]
    assert not signs(flat)


@pytest.mark.parametrize(
    ("code", "field", "bad"),
    [
        ("kl_high", "kl", 0.2),
        ("clip_high", "clip_fraction", 0.9),
        ("gradient_grows", "grad_norm", 0.05),
    ],
)
def test_limits_count_from_the_third_iteration_in_a_row(code: str, field: str, bad: float) -> None:
    usual = record(1, 0.0)[field]

    def value(i: int) -> float:
        return bad if i in (12, 13) or i >= 20 else usual

    assert signs(series(24, lambda i: 0.5, **{field: value})) == [(22, code)]


def test_groups_without_signal_are_counted() -> None:
    found = signs(series(WINDOW + 2, lambda i: 1.0, zero_variance_groups=lambda i: 7))
    assert found == [(WINDOW, "little_signal")]


def test_a_resume_repeats_iterations_and_a_history_counts() -> None:
    records = series(30, lambda i: 0.5 + 0.01 * (i % 3), clip_fraction=lambda i: 0.9 * (i > 27))
    health = Health({}, records[:29])
    assert not health.observe(record(28, 0.5, clip_fraction=0.9))  # 28 and 29 were lost
    assert not health.observe(record(29, 0.5, clip_fraction=0.9))
    assert [s.code for s in health.observe(record(30, 0.5, clip_fraction=0.9))] == ["clip_high"]


def test_what_is_missing_is_no_sign() -> None:
    empty = {"event": "iteration", "iteration": 1, "reward": {"mean": None, "terms": {}}}
    assert not signs([empty | {"iteration": i} for i in range(1, 40)])
    assert not Health({}).observe({"event": "phase", "name": "rollout", "iteration": 3})
