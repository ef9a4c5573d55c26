"""Small SVG charts as text: no library, no script, coloured by the page's CSS variables.

Everything is drawn in user units of a viewBox and scales with the page. Values under the pointer
are shown by SVG `<title>` elements, which every browser displays without JavaScript.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

Value = float | None

#: Longer curves are averaged into this many buckets: a screen shows no more.
MAX_POINTS = 400


@dataclass
class Series:
    """One curve.

    Attributes:
        name: legend text; empty = not in the legend.
        xs: positions on the x axis.
        ys: values; None (or not finite) leaves a gap.
        color: number of the CSS colour, 1 to 6.
        style: `line`, `thin`, `dashed`, `points` (joined by a thin line) or `dots`.
        low: lower end of a band (lines) or of an error bar (points), one per value.
        high: upper end.
        hint: text under the pointer for each value; made from the values when empty.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[Value]
    color: int = 1
    style: str = "line"
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    hint: Sequence[str] = field(default_factory=list)


def number(value: Value, signed: bool = False) -> str:
    """A value with three significant digits, as people read it; a dash when there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    sign = "+" if signed and value > 0 else "−" if value < 0 else ""
    size = abs(value)
    if size == 0:
        text = "0"
    elif size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{size:.2e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("e-", "e−")
    elif size >= 1000:
        text = f"{size:,.0f}"
    else:
        text = f"{size:.{3 if 0.01 <= size < 1 else max(0, 2 - math.floor(math.log10(size)))}f}"
    return sign + text


def tick_text(value: float) -> str:
    """The label of an axis tick: `number` without the zeros that only show precision."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def duration(seconds: float) -> str:
    """Seconds as `45.2 s`, `12 min 30 s` or `3 h 20 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values that lie inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Round away the noise of the multiplication: labels must read 0.3, not 0.30000000000000004.
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high]; 1-2-5 steps when there are too few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [f * 10.0**e for e in exponents for f in factors]
        ticks = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
        if len(ticks) >= 3:
            break
    stride = max(1, math.ceil(len(ticks) / 7))
    # A narrow range, such as 0.006 to 0.009, may hold none of these.
    return ticks[::stride] or nice_ticks(low, high, 3)


def drawable(value: Value, log: bool = False) -> bool:
    """Whether a value can be drawn; beyond 1e30 axis arithmetic would overflow."""
    return value is not None and abs(value) <= 1e30 and (value >= 1e-30 or not log)


def thin_out(series: Series) -> Series:
    """A curve of at most `MAX_POINTS` values: means over equal stretches."""
    count = len(series.xs)
    if count <= MAX_POINTS:
        return series
    edges = [round(i * count / MAX_POINTS) for i in range(MAX_POINTS + 1)]
    cuts = list(zip(edges, edges[1:], strict=False))

    def means(values: Sequence[Value]) -> list[Value]:
        result: list[Value] = []
        for a, b in cuts if values else []:
            kept = [v for v in values[a:b] if v is not None and math.isfinite(v)]
            result.append(sum(kept) / len(kept) if kept else None)
        return result

    return Series(
        series.name,
        [sum(series.xs[a:b]) / (b - a) for a, b in cuts],
        means(series.ys),
        series.color,
        series.style,
        means(series.low),
        means(series.high),
    )


def line_chart(
    series: Sequence[Series],
    *,
    width: int = 560,
    height: int = 240,
    x_label: str = "iteration",
    log: bool = False,
    include: Sequence[float] = (),
    lines: Sequence[tuple[float, str]] = (),
    marks: Sequence[tuple[float, str]] = (),
    x_names: Sequence[str] = (),
    label: str = "chart",
) -> str:
    """Curves over a common x axis.

    Args:
        series: the curves, drawn in order.
        width: width of the viewBox.
        height: height of the viewBox.
        x_label: name of the x axis.
        log: logarithmic y axis; values that are not positive are left out.
        include: values the y axis must contain.
        lines: horizontal reference lines (value, text).
        marks: vertical reference lines (x, text).
        x_names: names of the positions 0, 1, 2, ... for a categorical x axis.
        label: what the chart shows, for screen readers.

    Returns:
        An `<svg>` element, or a paragraph when there is nothing to draw.
    """
    series = [thin_out(s) for s in series]
    values = [v for s in series for v in (*s.ys, *s.low, *s.high)]
    values += [*include, *(value for value, _ in lines)]
    ys = [v for v in values if v is not None and drawable(v, log)]
    xs = [x for s in series for x in s.xs]
    if not xs or not any(drawable(y, log) for s in series for y in s.ys) or not ys:
        return '<p class="empty">No data yet.</p>'
    low, high = _padded(min(ys), max(ys), log)
    x_low, x_high = min(xs), max(xs)
    if x_names:
        x_low, x_high = -0.4, len(x_names) - 0.6
    elif x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    ticks = log_ticks(low, high) if log else nice_ticks(low, high, max(3, height // 55))
    labels = [tick_text(t) for t in ticks]
    left = 14 + 7.2 * max(len(text) for text in labels)
    right, top, bottom = 14, 12, 36
    scale: Callable[[float], float] = math.log10 if log else float

    def px(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (width - left - right)

    def py(y: float) -> float:
        part = (scale(y) - scale(low)) / (scale(high) - scale(low))
        return top + (1 - part) * (height - top - bottom)

    base = height - bottom
    out = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}">'
    ]
    for tick, text in zip(ticks, labels, strict=True):
        y = py(tick)
        out.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{width - right}"/>')
        out.append(f'<text class="end" x="{left - 7:.1f}" y="{y + 4:.1f}">{text}</text>')
    out += _x_axis(px, x_low, x_high, x_names, base, width, height, right, x_label)
    notes = []  # drawn last, so that no curve crosses them
    for x, text in marks:
        out.append(f'<path class="mark" d="M{px(x):.1f} {top}V{base}"/>')
        anchor = "end" if px(x) > width * 0.6 else "start"
        shift = -5 if anchor == "end" else 5
        notes.append(
            f'<text class="note {anchor}" x="{px(x) + shift:.1f}" y="{top + 10}">'
            f"{escape(text)}</text>"
        )
    for value, text in lines:
        y = py(value)
        out.append(f'<path class="rule" d="M{left:.1f} {y:.1f}H{width - right}"/>')
        where = f'x="{width - right - 4}" y="{y - 5 if y - top > 16 else y + 14:.1f}"'
        notes.append(f'<text class="note end" {where}>{escape(text)}</text>')
    for s in series:
        out += _draw(s, px, py, log, x_label, x_names)
    return "".join([*out, *notes, "</svg>"])


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return (low / 1.25, high * 1.25) if high > low * 1.01 else (low / 3, high * 3)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-30):
        pad = abs(high) * 0.1 or 1.0
        return low - pad, high + pad
    pad = (high - low) * 0.07
    # A quantity that is never negative must not get a negative stretch of axis.
    return (max(0.0, low - pad) if low >= 0 else low - pad), high + pad


def _x_axis(
    px: Callable[[float], float],
    x_low: float,
    x_high: float,
    names: Sequence[str],
    base: float,
    width: int,
    height: int,
    right: int,
    label: str,
) -> list[str]:
    out = []
    if names:
        stride = max(1, math.ceil(len(names) / max(1, int((px(x_high) - px(x_low)) / 46))))
        positions = [(float(i), names[i]) for i in range(0, len(names), stride)]
    else:
        ticks = nice_ticks(x_low, x_high, max(3, width // 110))
        positions = [(t, f"{t:,.0f}") for t in ticks if t == round(t)]
    for x, text in positions:
        out.append(f'<text class="mid" x="{px(x):.1f}" y="{base + 16:.1f}">{escape(text)}</text>')
    out.append(f'<text class="end" x="{width - right}" y="{height - 4}">{escape(label)}</text>')
    return out


def _draw(
    s: Series,
    px: Callable[[float], float],
    py: Callable[[float], float],
    log: bool,
    x_label: str,
    x_names: Sequence[str],
) -> list[str]:
    out: list[str] = []
    bars = s.style in ("points", "dots")
    if s.low and s.high and not bars:
        for run in _stretches(
            [drawable(a, log) and drawable(b, log) for a, b in zip(s.low, s.high, strict=True)]
        ):
            upper = [f"{px(s.xs[i]):.1f} {py(s.high[i] or 0.0):.1f}" for i in run]
            lower = [f"{px(s.xs[i]):.1f} {py(s.low[i] or 0.0):.1f}" for i in reversed(run)]
            out.append(f'<path class="band f{s.color}" d="M{"L".join(upper + lower)}Z"/>')
    if s.style != "dots":
        kind = {"thin": "thin", "points": "join", "dashed": "dashed"}.get(s.style, "line")
        for run in _stretches([drawable(y, log) for y in s.ys]):
            path = "L".join(f"{px(s.xs[i]):.1f} {py(s.ys[i] or 0.0):.1f}" for i in run)
            if len(run) > 1:
                out.append(f'<path class="{kind} s{s.color}" d="M{path}"/>')
            elif not bars:
                x, y = path.split(" ")
                out.append(f'<circle class="f{s.color}" cx="{x}" cy="{y}" r="2.5"/>')
    if s.style == "thin":
        return out  # the thin curve only carries the band; the smooth one has the values
    for i, value in enumerate(s.ys):
        if not drawable(value, log):
            continue
        x_px, y_px = px(s.xs[i]), py(value or 0.0)
        where = x_names[int(s.xs[i])] if x_names else f"{s.xs[i]:,.0f}"
        hint = s.hint[i] if s.hint else f"{x_label} {where}: {number(value)} {s.name}".strip()
        title = f"<title>{escape(hint)}</title>"
        if not bars:
            out.append(
                f'<circle class="hit" cx="{x_px:.1f}" cy="{y_px:.1f}" r="7">{title}</circle>'
            )
            continue
        if s.low and s.high and drawable(s.low[i], log) and drawable(s.high[i], log):
            ends = f"{py(s.low[i] or 0.0):.1f}V{py(s.high[i] or 0.0):.1f}"
            out.append(f'<path class="whisker s{s.color}" d="M{x_px:.1f} {ends}"/>')
        out.append(
            f'<circle class="dot f{s.color}" cx="{x_px:.1f}" cy="{y_px:.1f}" r="4.5">'
            f"{title}</circle>"
        )
    return out


def _stretches(flags: Sequence[bool]) -> list[list[int]]:
    """Indices of the runs of True."""
    runs: list[list[int]] = []
    for i, flag in enumerate(flags):
        if not flag:
            continue
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def legend(series: Sequence[Series]) -> str:
    """The legend of a chart as inline HTML; empty when only one curve has a name."""
    named = [s for s in series if s.name]
    if len(named) < 2:
        return ""
    swatch = {"points": "round", "dots": "round", "dashed": "dash"}
    items = [
        f'<span><i class="sw {swatch.get(s.style, "")} b{s.color}"></i>{escape(s.name)}</span>'
        for s in named
    ]
    return f'<span class="legend">{"".join(items)}</span>'


def share_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """One horizontal bar cut into shares, with a table below it.

    Args:
        parts: (name, amount, text of the amount); amounts are not negative.
    """
    total = sum(amount for _, amount, _ in parts)
    if total <= 0:
        return '<p class="empty">No data yet.</p>'
    cells, rows = [], []
    for index, (name, amount, text) in enumerate(parts):
        color, share = index % 6 + 1, 100 * amount / total
        hint = escape(f"{name}: {text}, {share:.1f} %", quote=True)
        cells.append(f'<i class="b{color}" style="width:{share:.3f}%" title="{hint}"></i>')
        rows.append(
            f'<tr><th><i class="sw b{color}"></i>{escape(name)}</th><td>{escape(text)}</td>'
            f"<td>{share:.1f} %</td></tr>"
        )
    return f'<div class="share">{"".join(cells)}</div><table class="plain">{"".join(rows)}</table>'
