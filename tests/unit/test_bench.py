"""The arithmetic of the bench: levels, ratios, what the steps explain, and how long runs are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flashgrpo_core.bench import analysis, page
from flashgrpo_core.bench.arms import (
    ARMS,
    DEFAULT_ARMS,
    LEVELS,
    QUICK,
    Cell,
    Sizes,
    cell_config,
    cell_key,
    cell_tables,
    chosen_arms,
    iteration_forwards,
)
from flashgrpo_core.bench.measure import explained_by_step
from flashgrpo_core.config_io import to_tables
from flashgrpo_core.errors import FlashGRPOError


def record(arm: str = "flash", seed: int = 0, rewards=(0.8, 0.9, 0.96, 0.98), **fields):
    curve = [
        {
            "iteration": 5 * i,
            "forwards": 1000.0 * i,
            "seconds": 20.0 * i,
            "cpu_seconds": 10.0 * i,
            "steps": 5 * i,
            "reward": reward,
        }
        for i, reward in enumerate(rewards)
    ]
    return {
        "arm": arm,
        "seed": seed,
        "learning_rate": 1e-3,
        "tuning": False,
        "curve": curve,
        "gradients": {
            "1.0000": {"raw": 1.0, "rectified": 2.0},
            "0.9000": {"raw": 6.0, "rectified": 3.0},
        },
        "explained": 0.0,
        "explained_by_chance": 0.1,
        "phases": {"rollout": 1.0, "score": 2.0, "update": 0.5},
        "peak_memory": 10,
        "diverged": False,
        "code": "abc",
        **fields,
    }


def test_a_level_is_met_between_two_evaluations() -> None:
    # 0.90 at 1000 and 0.96 at 2000 forwards: 0.95 lies at 5/6 of the way.
    assert analysis.to_level(record(), 0.95) == (pytest.approx(1000 + 1000 * 5 / 6), True)
    assert analysis.to_level(record(), 0.95, "cpu_seconds")[0] == pytest.approx(10 + 10 * 5 / 6)
    assert analysis.to_level(record(rewards=(0.96, 0.97)), 0.95) == (0.0, True)
    assert analysis.to_level(record(rewards=(0.8, 0.9)), 0.95) == (1000.0, False)


def test_collapse_is_a_fall_from_the_best_or_below_the_start() -> None:
    assert not analysis.collapsed(record(rewards=(0.8, 0.97, 0.9)))
    assert analysis.collapsed(record(rewards=(0.8, 0.97, 0.85)))
    assert analysis.collapsed(record(rewards=(0.8, 0.84, 0.79)))
    assert analysis.collapsed(record(diverged=True))


def test_ratio_of_medians_and_its_interval() -> None:
    ratio, low, high = analysis.ratio_interval([10, 20, 30], [100, 100, 100])
    assert ratio == 0.2 and low == pytest.approx(0.1) and high == pytest.approx(0.3)
    assert analysis.ratio_interval([5, 5], [20, 20]) == (0.25, 0.25, 0.25)


def test_the_learning_rate_is_the_one_with_the_best_late_reward() -> None:
    tuning = [
        record(rewards=rewards, learning_rate=rate, seed=seed)
        for seed in (1000, 1001)
        for rate, rewards in ((1e-4, (0.8, 0.81, 0.82, 0.83)), (1e-3, (0.8, 0.9, 0.9, 0.9)))
    ]
    assert analysis.best_learning_rates(tuning) == {"flash": 1e-3}
    assert analysis.learning_rate_table(tuning)["flash"][1e-4] == pytest.approx(0.825)


def test_the_step_explains_what_it_explains() -> None:
    """Exact on a hand-made case; 0 for iso-temporal groups; chance is (K - 1) / (N - 1)."""
    rows = [
        {"iteration": 1, "valid": True, "sde_step": step, "advantage": value}
        for step, value in ((0, 1.0), (0, 3.0), (1, -1.0), (1, -3.0))
    ]
    share, chance = explained_by_step(rows)
    assert share == pytest.approx(4 * 4 / 20)  # between: 4 x 2^2, total: 1 + 9 + 1 + 9
    assert 0 < chance < 1
    rng = np.random.default_rng(0)
    groups = []
    for iteration in range(40):
        for group in range(6):
            values = rng.normal(size=8)
            groups += [
                {"iteration": iteration, "valid": True, "sde_step": group % 5, "advantage": v}
                for v in values - values.mean()
            ]
    share, chance = explained_by_step(groups)
    assert share < 1e-12
    assert chance == pytest.approx(4 / 47, rel=0.1)
    assert explained_by_step([r | {"sde_step": 0} for r in rows]) == (0.0, 0.0)
    assert explained_by_step([r | {"valid": False} for r in rows]) == (0.0, 0.0)


def test_the_summary_counts_and_compares(tmp_path: Path) -> None:
    main = [record("flash", s, (0.8, 0.95, 0.97 + 0.001 * s)) for s in range(3)]
    main += [record("full", s, (0.8, 0.85, 0.9, 0.95)) for s in range(3)]
    found = analysis.summarise(main, [])
    level = found["arms"]["full"]["levels"]["0.97"]
    assert level["reached"] == 0 and level["forwards"]["each"] == [3000.0] * 3
    assert found["arms"]["flash"]["spread"] == {"raw": 6.0, "rectified": 1.5}
    assert found["shared"]["forwards"] == 2000.0
    assert found["arms"]["full"]["at_shared"]["forwards"]["median"] == pytest.approx(0.9)
    ratios = {(r["of"], r["to"], r["level"], r["axis"]): r for r in found["ratios"]}
    first = ratios["flash", "full", 0.95, "forwards"]
    assert first["ratio"] == pytest.approx(1 / 3) and first["known"]
    text = page.render(found)
    assert "Flash, shared noise" in text and "0.33" in text and text.count("<svg") >= 4
    # One noise level has no spread; the file stays JSON that every reader takes.
    single = record("flash", gradients={"1.0000": {"raw": 1.0, "rectified": 2.0}})
    page.write_page(analysis.summarise([single], []), tmp_path)
    text = (tmp_path / "bench.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["arms"]["flash"]["spread"] == {"raw": None, "rectified": None}
    none = analysis.summarise([record("flash", 0, (0.8, 0.8)), record("full", 0, (0.8, 0.8))], [])
    assert not any(r["known"] for r in none["ratios"])
    assert "no ratio" in page.render(none)


def test_arms_differ_only_in_what_they_say() -> None:
    """Same optimizer, window, reward and sizes; only noise, strategy or weights differ."""
    base = to_tables(cell_config(Cell("flash", 1e-3, 0), "", Sizes(), 24_000))
    allowed = {
        ("rollout", "noise"),
        ("rollout", "shared_prefix"),
        ("schedule", "strategy"),
        ("schedule", "train_steps"),
        ("loss", "rectification"),
        ("loss", "algorithm"),
        ("loss", "freeze_std"),
        ("rollout", "suffix_share"),
        ("schedule", "adaptive"),
        ("run", "iterations"),
        ("run", "name"),
        ("eval", "every"),
    }
    for arm in ARMS:
        other = to_tables(cell_config(Cell(arm, 1e-3, 0), "", Sizes(), 24_000))
        changed = {
            (t, k) for t, values in base.items() for k, v in values.items() if other[t].get(k) != v
        }
        assert changed <= allowed, arm
    assert set(DEFAULT_ARMS) <= set(ARMS)


def test_runs_are_as_long_as_their_budget() -> None:
    # 6 groups of 8, 10 steps, window [0, 5): by hand.
    expected = {
        "flash": 6 * (3 + 8 * 7) + 3 * 6,
        "flash_paper": 480 + 3 * 48,
        "mixed": 480 + 3 * 48,
        "window": 480 + 3 * 2 * 48,
        "full": 480 + 3 * 5 * 48,
        "full_shared": 6 * (1 + 8 * 9) + 3 * 6 * (1 + 4 * 8),
        "nft": 480 + 3 * 2 * 48,
    }
    for arm, forwards in expected.items():
        config = cell_config(Cell(arm, 1e-3, 0), "", Sizes(), 24_000)
        assert iteration_forwards(config) == pytest.approx(forwards)
        assert config.run.iterations == round(24_000 / forwards)


def test_a_finished_run_counts_only_for_the_same_settings() -> None:
    cell = Cell("flash", 1e-3, 0)
    assert cell_key(cell, QUICK) == cell_key(cell, QUICK)
    others = [Cell("full", 1e-3, 0), Cell("flash", 3e-3, 0), Cell("flash", 1e-3, 1)]
    keys = {cell_key(c, QUICK) for c in (cell, *others)} | {cell_key(cell, Sizes())}
    assert len(keys) == 5
    assert "output" not in cell_tables(cell, QUICK)["run"]
    assert all(0 < level < 1 for level in LEVELS)


@pytest.mark.parametrize("names", ["flash,flash", "nothing", "flash,,none", ","])
def test_unknown_arms_are_named(names: str) -> None:
    with pytest.raises(FlashGRPOError, match="--arms"):
        chosen_arms(names)
