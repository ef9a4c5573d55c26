"""A memory plan as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .cli_common import table
from .memory import MemoryPlan
from .memory_fit import Fit, words


def gb(size: float) -> str:
    """Bytes as `12.34 GB`."""
    return f"{size / 1e9:.2f} GB"


def phase_table(
    found: MemoryPlan,
    seconds: Mapping[str, float] | None = None,
    flops: Mapping[str, float] | None = None,
) -> str:
    """One row a phase; with operations and seconds of an iteration where they are given."""
    head = ["phase", "weights", "kept", "working", "device", "main memory"]
    rows = [head + (["TFLOP"] if flops else []) + (["time"] if seconds else [])]
    for p in found.phases:
        row = [p.name, *(gb(v) for v in (p.weights, p.kept, p.working, p.device, p.host))]
        if flops:
            row.append(f"{flops[p.name] / 1e12:,.1f}" if p.name in flops else "")
        if seconds:
            row.append(f"{seconds[p.name]:,.0f} s" if p.name in seconds else "")
        rows.append(row)
    return table(rows)


def card_table(fits: Sequence[Fit]) -> str:
    """One row a card: whether it holds the run, and what to change so that it does."""
    rows = [["card", "fits", "peak", "in", "  change"]]
    for f in fits:
        change = words(f.changes) or "nothing"
        if not f.fits:
            change = "no change known here is enough"
        if f.streamed:
            change += "; the text encoder streams from main memory"
        verdict = "no" if not f.fits else "then" if f.changes else "yes"
        peak = f.plan.peak
        rows.append([f"{f.card_gb:g} GB", verdict, gb(peak.device), peak.name, "  " + change])
    width = max(len(row[-1]) for row in rows)
    return table([[*row[:-1], row[-1].ljust(width)] for row in rows])
