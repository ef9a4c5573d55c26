"""The report's timeline: what the sampling and the scoring thread did in the newest iteration."""

from __future__ import annotations

from html import escape
from typing import Any

from .charts import duration

_LANES = (("sample", "sampling", 1), ("decode", "decoding", 2), ("wait", "waiting", 6))
_WIDTH, _LEFT, _ROW = 1000, 90, 30


def timeline(records: list[dict[str, Any]]) -> str:
    """A chart of the last `timeline` event, and what overlapping has saved in all."""
    if not records:
        return ""
    last = records[-1]
    busy = {lane: sum(_total(r, lane) for r in records) for lane in ("sample", "decode", "score")}
    took = sum(float(r.get("seconds") or 0) for r in records)
    saved = max(0.0, sum(busy.values()) - took)
    marks = []
    scale = (_WIDTH - _LEFT) / max(float(last.get("seconds") or 0), 1e-9)
    for row, lanes in enumerate((_LANES, (("score", "scoring", 3),))):
        for lane, words, color in lanes:
            for start, end in last["lanes"].get(lane, []):
                x, width = _LEFT + start * scale, max((end - start) * scale, 0.5)
                hint = escape(f"{words}: {start:.2f} s to {end:.2f} s")
                marks.append(
                    f'<rect x="{x:.1f}" y="{row * _ROW + 4}" width="{width:.1f}" height="20" '
                    f'style="fill:var(--c{color})"><title>{hint}</title></rect>'
                )
    labels = "".join(
        f'<text x="{_LEFT - 10}" y="{row * _ROW + 18}" class="end">{name}</text>'
        for row, name in enumerate(("sampling", "scoring"))
    )
    legend = "".join(
        f'<span><i class="sw b{color}"></i>{words}</span>'
        for _, words, color in (*_LANES, ("score", "scoring", 3))
    )
    say = (
        f"Scoring ran beside sampling: {duration(sum(busy.values()))} of work took "
        f"{duration(took)}, {duration(saved)} less than one after the other. Shown: iteration "
        f"{last.get('iteration')}."
    )
    return (
        '<section><figure class="card"><figcaption><b>Timeline</b>'
        f'<div class="legend">{legend}</div></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {2 * _ROW}" role="img" aria-label="Timeline">'
        f'{labels}{"".join(marks)}</svg><p class="say">{escape(say)}</p></figure></section>'
    )


def _total(record: dict[str, Any], lane: str) -> float:
    return float(sum(end - start for start, end in record["lanes"].get(lane, [])))
