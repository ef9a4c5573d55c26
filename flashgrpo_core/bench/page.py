"""The report of a bench: one page that needs nothing else, and its first chart as a picture."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_text_atomic
from ..runs.charts import Series, duration, legend, line_chart, number, share_bar
from ..runs.events import jsonable
from ..runs.report_style import STYLE
from .arms import ARMS, COLLAPSE

Record = dict[str, Any]

_AXES = {
    "forwards": "transformer forwards",
    "cpu_seconds": "processor seconds",
    "steps": "trained steps",
}


def write_page(summary: Record, folder: Path) -> Path:
    """Write `bench.json`, `bench.svg` and `bench.html`; returns the page."""
    write_text_atomic(folder / "bench.json", json.dumps(jsonable(summary), indent=1) + "\n")
    write_text_atomic(folder / "bench.svg", _picture(summary))
    page = folder / "bench.html"
    write_text_atomic(page, render(summary))
    return page


def render(summary: Record) -> str:
    """The page as text."""
    arms = summary["arms"]
    seeds = len(summary["seeds"])
    parts = [
        "<header><h1>Strategies on the tiny Wan</h1>"
        f"<p>{len(arms)} arms, {seeds} seed{'s' if seeds > 1 else ''} each"
        f"{_code_note(summary['code'])}</p></header>",
        _conclusions(summary),
        "<h2>Held-out reward</h2><p class='lead'>Median over the seeds; the band reaches from the "
        "lowest to the highest. A training forward and backward counts as 3 forwards; evaluations "
        "are not counted.</p>",
        "<div class='pair'>"
        + "".join(_figure(_curves(summary, axis), title, axis) for axis, title in _AXES.items())
        + "</div>",
        "<h2>Until a level is reached</h2><p class='lead'>The levels were fixed before the runs. A "
        "run that never reaches one counts with all it spent.</p>",
        _levels(summary),
        _ratios(summary),
        "<h2>Gradients by noise level</h2><p class='lead'>Norm of the LoRA gradient of a group's "
        "mean loss, averaged over the run, before and after the rectification.</p>",
        _gradients(summary),
        "<h2>What the advantages depend on</h2>",
        _explained(summary),
        "<h2>Cost of an iteration</h2>",
        _phases(summary),
        "<h2>Learning rates</h2><p class='lead'>Mean held-out reward of the last half of shorter "
        "runs on other seeds; the best one of each arm is used.</p>",
        _grid(summary),
        _edge_note(summary),
        "<h2>Arms</h2>",
        _table(["arm", "what it is"], [[ARMS[a].title, ARMS[a].what] for a in arms], numbers=False),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Strategies on the tiny Wan</title><style>{STYLE}"
        "td.left,th.left{text-align:left!important}.wide{overflow-x:auto}</style>"
        f"<main>{''.join(parts)}</main></html>\n"
    )


def _code_note(code: list[str]) -> str:
    return f", code {code[0]}" if len(code) == 1 else f", by {len(code)} versions of the code"


def _title(arm: str) -> str:
    return ARMS[arm].title


def _curves(summary: Record, axis: str) -> list[Series]:
    return [
        Series(
            _title(arm),
            row["curves"][axis]["x"],
            row["curves"][axis]["median"],
            color=i % 6 + 1,
            style="line" if i < 6 else "dashed",
            low=row["curves"][axis]["low"],
            high=row["curves"][axis]["high"],
        )
        for i, (arm, row) in enumerate(summary["arms"].items())
    ]


def _figure(series: list[Series], x_label: str, axis: str) -> str:
    title = f"Held-out reward over {x_label}"
    chart = line_chart(series, x_label=x_label, label=title)
    say = {
        "cpu_seconds": "One thread per run: on an idle machine these are seconds of wall-clock time.",
        "steps": "Optimizer steps, one per iteration.",
    }.get(axis, "")
    note = f'<p class="say">{say}</p>' if say else ""
    return (
        f'<figure class="card"><figcaption><b>{title}</b>{legend(series)}</figcaption>'
        f"{chart}{note}</figure>"
    )


def _conclusions(summary: Record) -> str:
    rows = []
    for r in summary["ratios"]:
        if r["axis"] != "forwards":
            continue
        if not r["known"]:
            rows.append(
                f"<li>{escape(_title(r['of']))} reaches {r['level']:g} in {r['reached'][r['of']]} "
                f"runs: no ratio to {escape(_title(r['to']))} can be given</li>"
            )
            continue
        total = {arm: summary["arms"][arm]["runs"] for arm in (r["of"], r["to"])}
        rows.append(
            f"<li>{escape(_title(r['of']))} needs <b>{r['ratio']:.2f}</b> "
            f"[{r['low']:.2f}, {r['high']:.2f}] of the forwards of {escape(_title(r['to']))} to "
            f"{r['level']:g} (reached by {r['reached'][r['of']]} of {total[r['of']]} and "
            f"{r['reached'][r['to']]} of {total[r['to']]} runs)</li>"
        )
    fallen = {_title(a): row["collapsed"] for a, row in summary["arms"].items() if row["collapsed"]}
    said = ", ".join(f"{escape(k)} ({v})" for k, v in fallen.items()) or "none"
    rows.append(
        f"<li>Collapsed runs: {said}. A run has collapsed when it ends {COLLAPSE:g} below its best "
        "held-out reward or below its start.</li>"
    )
    return f'<div class="card"><ul>{"".join(rows)}</ul></div>'


def _levels(summary: Record) -> str:
    rows = []
    for arm, row in summary["arms"].items():
        cells = [_title(arm)]
        for level in summary["levels"]:
            found = row["levels"][f"{level:g}"]
            each = ", ".join(number(v) for v in found["forwards"]["each"])
            cells.append(f"{found['reached']}/{row['runs']}")
            cells.append(number(found["forwards"]["median"]))
            cells.append(each)
            cells.append(duration(found["cpu_seconds"]["median"]))
        cells.append(number(row["at_shared"]["forwards"]["median"]))
        cells.append(number(row["at_shared"]["cpu_seconds"]["median"]))
        rows.append(cells)
    head = ["arm"]
    for level in summary["levels"]:
        head += [
            f"runs at {level:g}",
            "forwards, median",
            "each seed",
            "processor time, median",
        ]
    head += ["reward at equal forwards", "reward at equal time"]
    return _table(head, rows)


def _ratios(summary: Record) -> str:
    rows = [
        [
            f"{_title(r['of'])} / {_title(r['to'])}",
            f"{r['level']:g}",
            _AXES[r["axis"]],
            f"{r['ratio']:.2f}",
            f"[{r['low']:.2f}, {r['high']:.2f}]",
        ]
        for r in summary["ratios"]
        if r["known"]
    ]
    if not rows:
        return ""
    return _table(["ratio of medians", "level", "of", "ratio", "95 % interval"], rows)


def _gradients(summary: Record) -> str:
    rows = []
    for arm, row in summary["arms"].items():
        if math.isfinite(row["spread"]["raw"]):
            rows.append(
                [_title(arm), *(f"{row['spread'][kind]:.2f}" for kind in ("raw", "rectified"))]
            )
    first = next(iter(summary["arms"].values()))["gradients"]
    sigmas = list(first)
    series = [
        Series(name, list(range(len(sigmas))), [first[s][kind] for s in sigmas], color, "points")
        for kind, name, color in (("raw", "before", 2), ("rectified", "after", 1))
    ]
    title = f"{_title(next(iter(summary['arms'])))}: gradient norm by sigma"
    chart = line_chart(series, x_label="sigma", x_names=sigmas, log=True, label=title)
    return (
        f'<div class="pair"><figure class="card"><figcaption><b>{escape(title)}</b>'
        f"{legend(series)}</figcaption>{chart}</figure>"
        f"{_table(['largest / smallest norm', 'before', 'after'], rows)}</div>"
    )


def _explained(summary: Record) -> str:
    rows = [
        [_title(arm), f"{row['explained']:.4f}", f"{row['explained_by_chance']:.4f}"]
        for arm, row in summary["arms"].items()
        if row["explained_by_chance"] > 0
    ]
    text = (
        "<p class='lead'>Share of the advantages' variance that the stochastic step explains, beside "
        "the share that a random assignment of the same steps explains. Advantages of an "
        "iso-temporal group have mean 0 at its step, so its share is 0 by construction.</p>"
    )
    return text + _table(["arm", "explained by the step", "by chance"], rows)


def _phases(summary: Record) -> str:
    parts = []
    for arm, row in summary["arms"].items():
        shares = [(name, value, duration(value)) for name, value in row["phases"].items()]
        parts.append(
            f'<figure class="card"><figcaption><b>{escape(_title(arm))}</b></figcaption>'
            f"{share_bar(shares)}</figure>"
        )
    return f'<div class="pair">{"".join(parts)}</div>'


def _grid(summary: Record) -> str:
    grid = summary["learning_rate_grid"]
    rates = sorted({rate for row in grid.values() for rate in row}, key=float)
    if not rates:
        return "<p>The learning rates were given, none was tried.</p>"
    rows = []
    for arm, row in grid.items():
        used = summary["learning_rates"].get(arm)
        rows.append(
            [
                _title(arm),
                *(
                    f"{row[rate]:.3f}{' (used)' if float(rate) == used else ''}"
                    if rate in row
                    else "–"
                    for rate in rates
                ),
            ]
        )
    return _table(["arm", *(f"{float(rate):g}" for rate in rates)], rows)


def _edge_note(summary: Record) -> str:
    """Arms whose best rate is the first or last of the grid: a further one might be better still."""
    arms = [
        _title(arm)
        for arm, row in summary["learning_rate_grid"].items()
        if len(row) > 1
        and summary["learning_rates"].get(arm) in (min(map(float, row)), max(map(float, row)))
    ]
    if not arms:
        return ""
    return f"<p class='lead'>At the edge of the grid: {escape(', '.join(arms))}.</p>"


def _table(head: list[str], rows: list[list[str]], numbers: bool = True) -> str:
    left = "" if numbers else ' class="left"'
    top = "".join(f"<th{left}>{escape(h)}</th>" for h in head)
    body = "".join(
        f'<tr><th class="left">{escape(row[0])}</th>'
        + "".join(f"<td{left}>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="card wide"><table class="plain"><tr>{top}</tr>{body}</table></div>'


def _picture(summary: Record) -> str:
    """The curve over forwards as a file of its own, with its colours and legend inside."""
    series = _curves(summary, "forwards")
    chart = line_chart(
        series, width=760, height=360, x_label=_AXES["forwards"], label="held-out reward"
    )
    colours = ("#3563d9", "#d9662b", "#12886a", "#9a48b8", "#b08914", "#5f6b7a")
    rules = "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(colours, start=1))
    style = (
        "<style>svg{background:#fff;font-family:sans-serif}text{font-size:12px;fill:#5d636e}"
        ".end{text-anchor:end}.mid{text-anchor:middle}.grid{stroke:#ececea;fill:none}"
        ".line,.dashed{fill:none;stroke-width:2.2}.dashed{stroke-dasharray:6 4}.band{opacity:.12}"
        f".hit{{fill:none}}{rules}</style>"
    )
    names = "".join(
        f'<g transform="translate({60 + 225 * (i % 3)},{376 + 20 * (i // 3)})">'
        f'<path class="{s.style} s{s.color}" d="M0 0H22"/>'
        f'<text x="28" y="4">{escape(s.name)}</text></g>'
        for i, s in enumerate(series)
    )
    body = chart[chart.index(">") + 1 :].removesuffix("</svg>")
    height = 390 + 20 * ((len(series) - 1) // 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" '
        f'aria-label="held-out reward over transformer forwards">{style}{body}{names}</svg>\n'
    )
