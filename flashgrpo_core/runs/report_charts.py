"""The sections of the report that are curves."""

from __future__ import annotations

import math
from collections import defaultdict
from html import escape
from statistics import fmean, stdev
from typing import Any

from ..config import Config
from .charts import Series, Value, drawable, duration, legend, line_chart, number, share_bar
from .events import term_curves

Record = dict[str, Any]


def figure(title: str, series: list[Series], say: str = "", **options: Any) -> str:
    """One chart in a card, with its legend and a sentence that says how to read it."""
    chart = line_chart(series, label=title, **options)
    text = f'<p class="say">{escape(say)}</p>' if say else ""
    return (
        f'<figure class="card"><figcaption><b>{escape(title)}</b>{legend(series)}</figcaption>'
        f"{chart}{text}</figure>"
    )


def reward(
    iterations: list[Record],
    evaluations: list[Record],
    rewards: dict[int, list[Record]],
    judged: Record | None,
) -> str:
    """The reward curve: training rollouts with a band, held-out validation with error bars."""
    xs = [float(i["iteration"]) for i in iterations]
    means: list[Value] = [(i.get("reward") or {}).get("mean") for i in iterations]
    half = [_half_interval(i, rewards.get(int(i["iteration"]), [])) for i in iterations]
    low = [None if m is None or h is None else m - h for m, h in zip(means, half, strict=True)]
    high = [None if m is None or h is None else m + h for m, h in zip(means, half, strict=True)]
    smooth = len(xs) > 12
    hints = [
        f"iteration {x:,.0f}: {number(m)} ± {number(h)} (training rollouts)"
        for x, m, h in zip(xs, means, half, strict=True)
    ]
    series = []
    if xs:
        if smooth:
            series.append(Series("", xs, means, 1, "thin", low, high))
            series.append(Series("training rollouts", xs, running_mean(means), 1, hint=hints))
        else:
            series.append(Series("training rollouts", xs, means, 1, "line", low, high, hints))
    marks: list[tuple[float, str]] = []
    lines: list[tuple[float, str]] = []
    for weights, color in (("ema", 2), ("live", 3)):
        rows = [
            e for e in evaluations if e.get("split") == "validation" and e.get("weights") == weights
        ]
        if not rows:
            continue
        name = "validation" if color == 2 else "validation (live weights)"
        series.append(_validation(name, rows, color))
        base = rows[-1].get("baseline_mean")
        if not lines and base is not None:
            lines.append((float(base), f"start on validation prompts {number(base)}"))
    if judged and judged.get("split") == "test" and xs and judged["iteration"] != xs[-1]:
        marks.append((float(judged["iteration"]), "judged"))
    options: dict[str, Any] = {"lines": lines, "marks": marks, "label": "reward by iteration"}
    wide = line_chart(series, width=1120, height=330, **options)
    narrow = line_chart(series, width=560, height=330, **options)
    say = (
        "Line: mean reward of the training rollouts"
        + (", smoothed" if smooth else "")
        + "; band: 95 % interval of the mean over prompts. Dots: held-out validation prompts "
        "without injected noise, with the 95 % interval of the difference to the start. Rollouts carry "
        "injected noise and other prompts, so the two levels are not comparable; their slopes are."
    )
    return (
        f'<section><h2>Reward</h2><figure class="card"><figcaption><b>Mean reward</b>'
        f'{legend(series)}</figcaption><div class="wide">{wide}</div><div class="narrow">{narrow}'
        f'</div><p class="say">{say}</p></figure></section>'
    )


def _validation(name: str, rows: list[Record], color: int) -> Series:
    def end(row: Record, key: str) -> Value:
        base, edge = row.get("baseline_mean"), row.get(key)
        return None if base is None or edge is None else float(base) + float(edge)

    return Series(
        name,
        [float(r["iteration"]) for r in rows],
        [r.get("reward_mean") for r in rows],
        color,
        "points",
        [end(r, "ci_low") for r in rows],
        [end(r, "ci_high") for r in rows],
        [
            f"iteration {r['iteration']}: {number(r.get('reward_mean'))}, difference "
            f"{number(r.get('difference'), True)} ({number(r.get('ci_low'), True)} to "
            f"{number(r.get('ci_high'), True)})"
            for r in rows
        ],
    )


def _half_interval(record: Record, rows: list[Record]) -> Value:
    """Half the 95 % interval of an iteration's mean; videos of one prompt are not independent."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.get("valid", True) and drawable(row.get("total")):
            groups[str(row.get("group_id"))].append(float(row["total"]))
    if len(groups) < 2:
        return None
    means = [fmean(values) for values in groups.values()]
    return student(len(means) - 1) * stdev(means) / math.sqrt(len(means))


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to about 1 % from 2 degrees of freedom on.

    Cornish-Fisher expansion around the normal quantile (Abramowitz and Stegun 26.7.5); the first
    two values are exact.
    """
    exact = {1: 12.706, 2: 4.303}
    if freedom in exact:
        return exact[freedom]
    z, n = 1.959964, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def running_mean(values: list[Value]) -> list[Value]:
    """Centred running mean over about a tenth of the curve; gaps stay gaps."""
    radius = max(2, len(values) // 20)
    result: list[Value] = []
    for i, value in enumerate(values):
        # The window shrinks evenly at the ends, so that the curve does not lag there.
        reach = min(radius, i, len(values) - 1 - i)
        kept = [v for v in values[i - reach : i + reach + 1] if v is not None and math.isfinite(v)]
        result.append(fmean(kept) if value is not None and kept else None)
    return result


def terms(iterations: list[Record], evaluations: list[Record]) -> str:
    """One chart per reward term, training and validation."""
    names = list(term_curves({**record, "event": "iteration"} for record in iterations))
    if not names:
        return ""
    rows = [e for e in evaluations if e.get("split") == "validation"]
    rows = [e for e in rows if e.get("weights") == "ema"] or rows
    cards = []
    for index, name in enumerate(names):
        xs = [float(i["iteration"]) for i in iterations]
        ys = [_mean((((i.get("reward") or {}).get("terms")) or {}).get(name)) for i in iterations]
        color = (0, 2, 3, 4)[index % 4] + 1
        if len(xs) > 12:
            series = [
                Series("", xs, ys, color, "thin"),
                Series("training", xs, running_mean(ys), color),
            ]
        else:
            series = [Series("training", xs, ys, color)]
        points = [(float(e["iteration"]), _mean((e.get("terms") or {}).get(name))) for e in rows]
        points = [(x, y) for x, y in points if y is not None]
        if points:
            series.append(
                Series("validation", [x for x, _ in points], [y for _, y in points], 2, "points")
            )
        cards.append(figure(name, series, height=210))
    return f'<section><h2>Reward terms</h2><div class="pair">{"".join(cards)}</div></section>'


def _mean(value: Any) -> Value:
    if isinstance(value, dict):
        value = next((value[k] for k in ("mean", "reward_mean", "reward") if k in value), None)
    return float(value) if isinstance(value, (int, float)) else None


def health(iterations: list[Record], config: Config | None) -> str:
    """Clip fraction, ratio drift, KL, gradient norm and what else tells a sick run early."""
    if not iterations:
        return ""
    xs = [float(i["iteration"]) for i in iterations]

    def column(key: str) -> list[Value]:
        return [_mean(i.get(key)) for i in iterations]

    clip = [(config.loss.clip, f"clip range {config.loss.clip:g}")] if config else []
    clipped = [None if v is None else 100 * v for v in column("clip_fraction")]
    cards = [
        figure(
            "Clipped samples, %",
            [Series("", xs, clipped, 1)],
            "Share of samples whose ratio left the clip range. With one update per rollout it "
            "should "
            "be 0.",
            include=(0.0, 1.0),
            height=210,
        ),
        figure(
            "Ratio drift",
            [Series("", xs, column("ratio_drift"), 4)],
            "Largest |ratio − 1| before the update: rounding differences between sampling and "
            "training. Must stay well below the clip range." + _exact_note(column("ratio_drift")),
            log=any(v for v in column("ratio_drift")),
            lines=clip,
            height=210,
        ),
    ]
    if any(column("kl")):
        cards.append(
            figure(
                "KL to the reference policy",
                [Series("", xs, column("kl"), 3)],
                "Per latent element, averaged over the SDE steps of the iteration.",
                include=(0.0,),
                height=210,
            )
        )
    cards.append(
        figure(
            "Gradient norm",
            [Series("", xs, column("grad_norm"), 1)],
            "Norm over all LoRA weights before clipping.",
            log=True,
            height=210,
        )
    )
    cards.append(
        figure(
            "Learning rate",
            [Series("", xs, column("lr"), 6)],
            include=(0.0,),
            height=210,
        )
    )
    cards.append(
        figure(
            "Groups without a difference",
            [Series("", xs, column("zero_variance_groups"), 5)],
            "Prompts whose videos all got the same reward: they teach nothing and are skipped.",
            include=(0.0, 1.0),
            height=210,
        )
    )
    return f'<section><h2>Health</h2><div class="pair">{"".join(cards)}</div></section>'


def _exact_note(values: list[Value]) -> str:
    present = [v for v in values if v is not None]
    if present and not any(present):
        return " It was exactly 0 in every iteration."
    zeros = sum(1 for v in present if v == 0)
    return f" Exactly 0 in {zeros} of {len(present)} iterations (not drawn)." if zeros else ""


def gradients(iterations: list[Record]) -> str:
    """Gradient norm by noise level, before and after temporal gradient rectification."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in iterations:
        for sigma, entry in (record.get("grad_norm_by_sigma") or {}).items():
            for kind in ("raw", "rectified"):
                value = entry.get(kind) if isinstance(entry, dict) else None
                if value is not None and math.isfinite(value) and value > 0:
                    found[sigma][kind].append(value)
    if not found:
        return ""
    names = sorted(found, key=float, reverse=True)
    series, spread = [], []
    for kind, label, color in (("raw", "before", 2), ("rectified", "after", 1)):
        ys: list[Value] = [fmean(found[n][kind]) if found[n][kind] else None for n in names]
        hints = [
            f"sigma {n}: {number(y)} {label} rectification, {len(found[n][kind])} values"
            for n, y in zip(names, ys, strict=True)
        ]
        series.append(
            Series(
                f"{label} rectification", list(range(len(names))), ys, color, "points", hint=hints
            )
        )
        present = [y for y in ys if y is not None]
        if len(present) > 1:
            spread.append(f"{max(present) / min(present):.3g}× {label}")
    say = "Mean over the run. Rectification is to keep one noise level from dominating the update"
    say += f"; largest to smallest: {', '.join(spread)}." if spread else "."
    options: dict[str, Any] = {"x_label": "sigma", "log": True, "x_names": names}
    wide = line_chart(series, width=1120, height=270, label="gradient norm by sigma", **options)
    narrow = line_chart(series, width=560, height=300, label="gradient norm by sigma", **options)
    return (
        '<section><h2>Gradient by noise level</h2><figure class="card"><figcaption>'
        f'<b>Gradient norm by sigma</b>{legend(series)}</figcaption><div class="wide">{wide}</div>'
        f'<div class="narrow">{narrow}</div><p class="say">{escape(say)}</p></figure></section>'
    )


def phases(records: list[Record], iterations: list[Record]) -> str:
    """Where the time went."""
    seconds: dict[str, float] = defaultdict(float)
    for record in records:
        seconds[str(record.get("name"))] += float(record.get("seconds") or 0.0)
    if not seconds:
        return ""
    parts = [
        (name, total, duration(total))
        for name, total in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    xs = [float(i["iteration"]) for i in iterations]
    each = [_mean(i.get("seconds")) for i in iterations]
    chart = figure("Seconds per iteration", [Series("", xs, each, 6)], include=(0.0,), height=210)
    return (
        '<section><h2>Time</h2><div class="pair"><div class="card"><b>Time per phase</b>'
        f"{share_bar(parts)}</div>{chart}</div></section>"
    )
