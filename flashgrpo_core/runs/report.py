"""`report.html`: one file that shows what a run did, to be opened anywhere and shown around.

It is drawn from the run folder alone (events, rewards, settings, sample videos), holds no script
and no reference to anything outside of itself, and escapes every text it did not write.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..config import Config
from ..config_io import build_config, to_tables
from ..errors import FlashGRPOError
from ..files import write_text_atomic
from . import report_charts as draw
from .charts import duration, number
from .events import latest_each, read_events, read_rewards
from .folder import RunFolder
from .report_style import STYLE
from .report_timeline import timeline
from .report_videos import films

Record = dict[str, Any]


@dataclass
class RunData:
    """What the report is drawn from; after a resume the last record of each iteration counts."""

    run: RunFolder
    status: str
    config: Config | None
    started: list[Record]
    finished: Record
    iterations: list[Record]
    evaluations: list[Record]
    phases: list[Record]  # all of them: repeated work took time too
    timelines: list[Record]
    warnings: list[Record]
    rewards: dict[int, list[Record]]
    samples: list[Record]


def write_report(run_folder: str | Path | RunFolder) -> Path:
    """Draw the report of a run, finished or not, and write `report.html` into its folder.

    Args:
        run_folder: the run's folder.

    Returns:
        Path of the report.

    Raises:
        FlashGRPOError: there is no run, or the file cannot be written.
    """
    run = run_folder if isinstance(run_folder, RunFolder) else RunFolder.at(run_folder)
    write_text_atomic(run.report, render(read_run(run)))
    return run.report


def read_run(run: RunFolder) -> RunData:
    """Collect everything the report shows."""
    events = read_events(run.events)
    rewards: dict[int, list[Record]] = defaultdict(list)
    for row in read_rewards(run.rewards):
        rewards[int(row.get("iteration") or 0)].append(row)
    try:
        config: Config | None = run.config()
    except FlashGRPOError:
        config = None  # written by another version: the curves are still worth seeing
    last = [e for e in events if e.get("event") in ("run_started", "run_finished")][-1:]
    return RunData(
        run=run,
        status=run.status(),
        config=config,
        started=[e for e in events if e.get("event") == "run_started"],
        finished=last[0] if last and last[0]["event"] == "run_finished" else {},
        iterations=latest_each(events, "iteration"),
        evaluations=latest_each(events, "evaluation", "split", "weights"),
        phases=[e for e in events if e.get("event") == "phase"],
        timelines=latest_each(events, "timeline"),
        warnings=latest_each(events, "warning", "code", "message"),
        rewards=dict(rewards),
        samples=run.read_samples(),
    )


def headline_evaluation(data: RunData) -> Record | None:
    """The evaluation a run is judged by: the final test, else the newest validation."""
    weights = data.config.eval.weights if data.config else "ema"
    # At iteration 0 the start is compared with itself; that says nothing.
    rows = [e for e in data.evaluations if e.get("difference") is not None and e.get("iteration")]
    rows = [e for e in rows if e.get("weights") == weights] or rows
    tests = [e for e in rows if e.get("split") == "test"]
    rows = tests or rows
    return rows[-1] if rows else None


def render(data: RunData) -> str:
    """The whole page."""
    judged = headline_evaluation(data)
    sections = [
        _header(data),
        _headline(data, judged),
        _warnings(data.warnings),
        draw.reward(data.iterations, data.evaluations, data.rewards, judged),
        films(data.run.samples, data.samples, judged),
        _result_tables(data.evaluations),
        draw.terms(data.iterations, data.evaluations),
        draw.health(data.iterations, data.config),
        draw.gradients(data.iterations),
        draw.phases(data.phases, data.iterations),
        timeline(data.timelines),
        _settings(data.config),
        _footer(data),
    ]
    title = escape(f"{data.run.name} · Flash-GRPO")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; media-src 'self' data:; img-src data:\">"
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def _header(data: RunData) -> str:
    done = data.iterations[-1]["iteration"] if data.iterations else 0
    planned = data.config.run.iterations if data.config else 0
    status = data.status
    if status == "unfinished":
        status = str(data.finished.get("status") or "unfinished")
    place = f"iteration {done:,}" + (f" of {planned:,}" if planned and done < planned else "")
    model = Path(data.config.model.transformer).name if data.config else ""
    if model == "tiny":
        model = "embedded tiny Wan"
    parts = [part for part in (model, place) if part]
    return (
        f"<header><h1>{escape(data.run.name)}</h1>"
        f'<span class="chip {escape(data.status)}">{escape(status)}</span>'
        f"<p>{escape(' · '.join(parts))}</p></header>"
    )


def _headline(data: RunData, judged: Record | None) -> str:
    if judged is None:
        left = (
            '<p class="key">Result</p><p class="big flat">–</p><p class="what">Not judged yet: '
            "there has been no held-out evaluation since the start.</p>"
        )
    else:
        left = _verdict(judged)
    facts = "".join(
        f'<dl class="{"long" if len(text) > 24 else ""}"><dt>{escape(name)}</dt>'
        f'<dd class="{"small" if len(text) > 14 else ""}">'
        f"{escape(text)}</dd></dl>"
        for name, text in _facts(data, judged)
    )
    return f'<section class="card hero"><div>{left}</div><div class="facts">{facts}</div></section>'


def _verdict(judged: Record) -> str:
    low, high, difference = (judged.get(key) for key in ("ci_low", "ci_high", "difference"))
    tone, words = "flat", "No clear change"
    if low is not None and low > 0:
        tone, words = "up", "Better than the start"
    elif high is not None and high < 0:
        tone, words = "down", "Worse than the start"
    weights = {"ema": "averaged (EMA)", "live": "live"}.get(str(judged.get("weights")), "")
    split = "test" if judged.get("split") == "test" else "validation"
    prompts, seeds = judged.get("prompts"), judged.get("seeds")
    prompts = len(prompts) if isinstance(prompts, list) else prompts
    seeds = len(seeds) if isinstance(seeds, list) else seeds
    interval = (
        f"95 % interval {number(low, signed=True)} to {number(high, signed=True)}"
        if low is not None and high is not None
        else "no interval: too few prompts"
    )
    return (
        f'<p class="key">Reward on held-out {split} prompts</p>'
        f'<p class="big {tone}">{number(difference, signed=True)}</p>'
        f'<p class="what"><b>{words}.</b> {number(judged.get("baseline_mean"))} → '
        f"{number(judged.get('reward_mean'))}, {interval}.</p>"
        f'<p class="fine">Judged: the {escape(weights)} weights of iteration '
        f"{judged.get('iteration')}, sampled without injected noise; {escape(str(prompts))} "
        "prompts "
        f"× {escape(str(seeds))} seeds, each video against its twin from the start.</p>"
    )


def _facts(data: RunData, judged: Record | None) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    last = data.iterations[-1] if data.iterations else {}
    seconds = sum(float(p.get("seconds") or 0) for p in data.phases) or sum(
        float(i.get("seconds") or 0) for i in data.iterations
    )
    videos = sum(len(rows) for rows in data.rewards.values())
    start = data.started[-1] if data.started else {}
    device = str(start.get("device_name") or start.get("device") or "")
    world = start.get("world_size") or 1
    facts.append(("Iterations", f"{last.get('iteration', 0):,}"))
    if videos:
        facts.append(("Videos sampled", f"{videos:,}"))
    if last.get("forwards_total"):
        facts.append(("Transformer forwards", f"{int(last['forwards_total']):,}"))
    if seconds:
        facts.append(("Computing time", duration(seconds)))
    peak = max((int(i.get("peak_memory") or 0) for i in data.iterations), default=0)
    if peak:
        facts.append(("Peak memory", f"{peak / 2**30:.1f} GiB"))
    if device:
        facts.append(("Device", device + (f" × {world}" if world != 1 else "")))
    if data.started:
        facts.append(
            ("Started", str(data.started[0].get("time", ""))[:16].replace("T", " ") + " UTC")
        )
    if len(data.started) > 1:
        facts.append(("Resumed", f"{len(data.started) - 1}×"))
    lora = data.finished.get("lora")
    for path in lora if isinstance(lora, list) else [lora] if lora else []:
        facts.append(("LoRA", Path(str(path).replace("\\", "/")).name))
    return facts


def _warnings(warnings: list[Record]) -> str:
    grouped: dict[str, list[Record]] = defaultdict(list)
    for record in warnings:
        grouped[str(record.get("code") or record.get("message"))].append(record)
    if not grouped:
        return ""
    items = []
    for records in grouped.values():
        last = records[-1]
        text = str(last.get("message") or last.get("code"))
        fix = str(last.get("fix") or "")
        where = sorted({int(r.get("iteration") or 0) for r in records})
        when = (
            f"iteration {where[0]}"
            if len(where) == 1
            else f"{len(where)} iterations, last {where[-1]}"
        )
        items.append(
            f"<li>{escape(text)}{' ' + escape(fix) if fix and fix not in text else ''} "
            f"<small>({when})</small></li>"
        )
    return f'<section class="card warn"><b>Warnings</b><ul>{"".join(items)}</ul></section>'


def _result_tables(evaluations: list[Record]) -> str:
    rows = [e for e in evaluations if e.get("iteration")]
    tests = [e for e in rows if e.get("split") == "test"]
    final = (tests or rows)[-1:]
    if not final:
        return ""
    record = final[0]
    body = [_result_row("Reward (total)", record, "total")]
    start = starting_terms(evaluations, record)
    for name, value in (record.get("terms") or {}).items():
        term = {"reward_mean": value, "baseline_mean": start.get(name)}
        body.append(_result_row(name, term, ""))
    for other in tests[:-1]:
        where = f"earlier test, iteration {other['iteration']}, {other.get('weights')} weights"
        body.append(_result_row(where, other, ""))
    return (
        f"<section><h2>{'Final test' if tests else 'Newest validation'}</h2>"
        '<div class="card scroll"><table><thead><tr><th></th><th>Start</th><th>Trained</th>'
        "<th>Difference</th><th>95 % interval</th></tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div></section>"
    )


def starting_terms(evaluations: list[Record], record: Record) -> dict[str, float]:
    """Mean of each term under the starting policy, where the run recorded it."""
    if isinstance(record.get("baseline_terms"), dict):
        return record["baseline_terms"]
    for other in evaluations:
        if other.get("split") == record.get("split") and not other.get("iteration"):
            return other.get("terms") or {}
    return {}


def _result_row(name: str, record: Record, kind: str) -> str:
    low, high, difference = (record.get(key) for key in ("ci_low", "ci_high", "difference"))
    base, mean = record.get("baseline_mean"), record.get("reward_mean")
    if difference is None and base is not None and mean is not None:
        difference = mean - base
    tone = "up" if low is not None and low > 0 else "down" if high is not None and high < 0 else ""
    interval = (
        "–" if low is None or high is None else f"{number(low, True)} to {number(high, True)}"
    )
    return (
        f'<tr class="{kind}"><td>{escape(name)}</td><td>{number(base)}</td><td>{number(mean)}</td>'
        f'<td class="{tone}">{number(difference, True)}</td><td>{interval}</td></tr>'
    )


def _settings(config: Config | None) -> str:
    if config is None:
        return ""
    tables = to_tables(config)
    usual = to_tables(
        build_config(
            {
                "model": {"transformer": config.model.transformer},
                "run": {"preset": config.run.preset},
            }
        )
    )
    cards = []
    for table, values in tables.items():
        rows = []
        for key, value in values.items():
            mark = ' class="set"' if value != usual[table][key] else ""
            rows.append(f"<tr{mark}><th>{escape(key)}</th><td>{escape(_setting(value))}</td></tr>")
        cards.append(
            f'<div class="card"><h3>{table}</h3><table class="plain">{"".join(rows)}</table></div>'
        )
    return (
        f'<section><h2>Settings</h2><p class="lead">Preset {escape(config.run.preset)}; set '
        f'by hand: bold.</p><div class="settings">{"".join(cards)}</div></section>'
    )


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value or "–"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and all(isinstance(item, (str, int)) for item in value):
        return ", ".join(map(str, value)) or "–"
    return json.dumps(value, ensure_ascii=False)


def _footer(data: RunData) -> str:
    start = data.started[-1] if data.started else {}
    versions = start.get("versions")
    parts = (
        [f"{name} {value}" for name, value in versions.items()]
        if isinstance(versions, dict)
        else []
    )
    parts.append(f"event format {start.get('schema', '?')}")
    return f"<footer>{escape(' · '.join(map(str, parts)))}</footer>"
