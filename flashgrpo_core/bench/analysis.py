"""From the records of all runs to what the report states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arms import COLLAPSE, LEVELS, Cell

Record = dict[str, Any]

#: Resamples of a bootstrap interval.
RESAMPLES = 10_000

#: What a curve can be drawn over.
AXES = ("forwards", "cpu_seconds", "steps")


def late_reward(record: Record) -> float:
    """Mean held-out reward of the last half of a run's evaluations: what a learning rate is worth."""
    rewards = [point["reward"] for point in record["curve"]]
    return float(np.mean(rewards[len(rewards) // 2 :]))


def best_learning_rates(tuning: Sequence[Record]) -> dict[str, float]:
    """The learning rate of each arm with the highest mean `late_reward` over the tuning seeds."""
    found: dict[str, float] = {}
    for arm in dict.fromkeys(r["arm"] for r in tuning):
        table = learning_rate_table(tuning)[arm]
        found[arm] = max(table, key=lambda rate: table[rate])
    return found


def learning_rate_table(tuning: Sequence[Record]) -> dict[str, dict[float, float]]:
    """Arm -> learning rate -> mean `late_reward`."""
    found: dict[str, dict[float, list[float]]] = {}
    for record in tuning:
        rates = found.setdefault(record["arm"], {})
        rates.setdefault(record["learning_rate"], []).append(late_reward(record))
    return {
        arm: {rate: float(np.mean(v)) for rate, v in sorted(rates.items())}
        for arm, rates in found.items()
    }


def to_level(record: Record, level: float, axis: str = "forwards") -> tuple[float, bool]:
    """What a run spent until its held-out reward first reached a level.

    Returns:
        The amount, linear between evaluations, and True; or everything it spent and False.
    """
    before = None
    for point in record["curve"]:
        if point["reward"] >= level:
            if before is None:
                return float(point[axis]), True
            share = (level - before["reward"]) / (point["reward"] - before["reward"])
            return before[axis] + share * (point[axis] - before[axis]), True
        before = point
    return float(record["curve"][-1][axis]), False


def collapsed(record: Record) -> bool:
    """Whether a run ended without numbers, or far below its best held-out reward or its start."""
    if record["diverged"]:
        return True
    rewards = [point["reward"] for point in record["curve"]]
    return rewards[-1] < max(rewards) - COLLAPSE or rewards[-1] < rewards[0]


def ratio_interval(
    above: Sequence[float], below: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of medians with a 95 % bootstrap interval, seeds of both sides resampled.

    Args:
        above: one value per seed.
        below: one value per seed.
        seed: of the resampling.
    """
    rng = np.random.default_rng(seed)
    a, b = np.asarray(above, float), np.asarray(below, float)
    top = np.median(a[rng.integers(len(a), size=(RESAMPLES, len(a)))], axis=1)
    bottom = np.median(b[rng.integers(len(b), size=(RESAMPLES, len(b)))], axis=1)
    low, high = np.quantile(top / bottom, (0.025, 0.975))
    return float(np.median(a) / np.median(b)), float(low), float(high)


def aligned(records: Sequence[Record], axis: str, points: int = 24) -> dict[str, list[float]]:
    """Curves of several seeds on one axis: median, lowest and highest held-out reward.

    The axis ends where the shortest run does.
    """
    end = min(r["curve"][-1][axis] for r in records)
    xs = np.linspace(0.0, end, points)
    rows = np.array(
        [
            np.interp(xs, [p[axis] for p in r["curve"]], [p["reward"] for p in r["curve"]])
            for r in records
        ]
    )
    return {
        "x": xs.tolist(),
        "median": np.median(rows, axis=0).tolist(),
        "low": rows.min(0).tolist(),
        "high": rows.max(0).tolist(),
    }


def at_amount(records: Sequence[Record], axis: str, amount: float) -> dict[str, float]:
    """Held-out reward of several seeds after an amount, `median`, `low`, `high`."""
    found = [
        float(np.interp(amount, [p[axis] for p in r["curve"]], [p["reward"] for p in r["curve"]]))
        for r in records
    ]
    return {"median": float(np.median(found)), "low": min(found), "high": max(found)}


def summarise(main: Sequence[Record], tuning: Sequence[Record]) -> Record:
    """Everything the report states, as data.

    Args:
        main: records of the comparison.
        tuning: records that chose the learning rates.
    """
    arms = list(dict.fromkeys(r["arm"] for r in main))
    by_arm = {arm: [r for r in main if r["arm"] == arm] for arm in arms}
    shared = {
        axis: min(r["curve"][-1][axis] for r in main) for axis in AXES
    }  # what every run has spent
    return {
        "code": sorted({r["code"] for r in (*main, *tuning)}),
        "seeds": sorted({r["seed"] for r in main}),
        "learning_rates": {arm: by_arm[arm][0]["learning_rate"] for arm in arms},
        "learning_rate_grid": learning_rate_table(tuning),
        "levels": list(LEVELS),
        "shared": shared,
        "arms": {arm: _arm(by_arm[arm], shared) for arm in arms},
        "ratios": [
            _ratio(by_arm, a, b, level, axis)
            for level in LEVELS
            for axis in ("forwards", "cpu_seconds")
            for a, b in (("flash", "full"), ("flash", "flash_paper"), ("flash_paper", "full"))
            if a in by_arm and b in by_arm
        ],
    }


def _arm(records: Sequence[Record], shared: dict[str, float]) -> Record:
    def median(value: Callable[[Record], float]) -> float:
        return float(np.median([value(r) for r in records]))

    sigmas = list(dict.fromkeys(s for r in records for s in r["gradients"]))
    gradients = {
        s: {
            kind: float(np.mean([r["gradients"][s][kind] for r in records if s in r["gradients"]]))
            for kind in ("raw", "rectified")
        }
        for s in sorted(sigmas, reverse=True)
    }
    return {
        "runs": len(records),
        "collapsed": sum(collapsed(r) for r in records),
        "start": median(lambda r: r["curve"][0]["reward"]),
        "last": median(lambda r: r["curve"][-1]["reward"]),
        "best": median(lambda r: max(p["reward"] for p in r["curve"])),
        "forwards": median(lambda r: r["curve"][-1]["forwards"]),
        "iterations": records[0]["curve"][-1]["iteration"],
        "levels": {
            f"{level:g}": {
                "reached": sum(to_level(r, level)[1] for r in records),
                **{axis: _spent([to_level(r, level, axis)[0] for r in records]) for axis in AXES},
            }
            for level in LEVELS
        },
        "at_shared": {axis: at_amount(records, axis, shared[axis]) for axis in AXES},
        "curves": {axis: aligned(records, axis) for axis in AXES},
        "gradients": gradients,
        "spread": {kind: spread(gradients, kind) for kind in ("raw", "rectified")},
        "explained": median(lambda r: r["explained"]),
        "explained_by_chance": median(lambda r: r["explained_by_chance"]),
        "phases": {
            name: float(np.mean([r["phases"].get(name, 0.0) for r in records]))
            for name in ("rollout", "score", "update")
        },
        "peak_memory": max(r["peak_memory"] for r in records),
    }


def _spent(each: list[float]) -> Record:
    return {"median": float(np.median(each)), "each": [round(v, 1) for v in each]}


def spread(gradients: dict[str, dict[str, float]], kind: str) -> float:
    """Largest over smallest gradient norm of the steps; nan with a single one."""
    values = [norm[kind] for norm in gradients.values() if norm[kind] > 0]
    return max(values) / min(values) if len(values) > 1 else math.nan


def _ratio(by_arm: dict[str, list[Record]], a: str, b: str, level: float, axis: str) -> Record:
    spent = {arm: [to_level(r, level, axis) for r in by_arm[arm]] for arm in (a, b)}
    reached = {arm: sum(ok for _, ok in spent[arm]) for arm in (a, b)}
    ratio, low, high = ratio_interval([v for v, _ in spent[a]], [v for v, _ in spent[b]])
    return {
        "of": a,
        "to": b,
        "level": level,
        "axis": axis,
        "ratio": ratio,
        "low": low,
        "high": high,
        "reached": reached,
        # Budgets over budgets say nothing: at least the cheaper side's median must be a level reached.
        "known": 2 * reached[a] > len(spent[a]),
    }


def cells_of(arms: Sequence[str], rates: dict[str, float], seeds: Sequence[int]) -> list[Cell]:
    """The cells of the comparison, seed by seed so that an interrupted matrix is balanced."""
    return [Cell(arm, rates[arm], seed) for seed in seeds for arm in arms]
