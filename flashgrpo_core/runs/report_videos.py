"""The before/after videos of the report."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

from ..errors import FlashGRPOError
from ..files import resolve_inside
from .charts import number

Record = dict[str, Any]

#: Videos that are shown, and how much of them is put into the page itself.
MAX_PAIRS = 12
MAX_EMBEDDED = 48 * 1024 * 1024


def films(folder: Path, samples: list[Record], judged: Record | None) -> str:
    """Pairs of videos from the start and from the trained policy, same prompt and same seed.

    Args:
        folder: the run's `samples` folder; paths in `samples` are relative to it.
        samples: entries of `samples/index.json`.
        judged: the evaluation in the headline; its videos are preferred.
    """
    chosen, iteration, split = choose(samples, judged)
    if not chosen:
        return ""
    left, cards = MAX_EMBEDDED, []
    for entry in chosen:
        halves = []
        for key, reward, label in (
            ("baseline_file", "baseline_reward", "Start"),
            ("file", "reward", "Trained"),
        ):
            tag, used = _video(folder, entry.get(key), label, left)
            left -= used
            halves.append(
                f'<div>{tag}<div class="cap"><span>{label}</span>'
                f"<b>{number(entry.get(reward))}</b></div></div>"
            )
        cards.append(
            f'<div class="card film"><div class="two">{"".join(halves)}</div>'
            f"<p>{_prompt(entry)}{_change(entry)}</p></div>"
        )
    known = [e for e in samples if e.get("split") == split and e.get("iteration") == iteration]
    note = (
        f"Same prompt, same seed, sampled without injected noise; {escape(str(split))} prompts, "
        f"iteration {iteration}. "
    )
    note += (
        f"{len(chosen)} of {len(known)}, evenly spaced, not picked by score."
        if len(known) > len(chosen)
        else "All videos that were kept, none picked by score."
    )
    return (
        f'<section><h2>Before and after</h2><p class="lead">{note}</p>'
        f'<div class="films">{"".join(cards)}</div></section>'
    )


def choose(samples: list[Record], judged: Record | None) -> tuple[list[Record], int, str]:
    """The entries to show: those of the judged evaluation, else of the newest one with videos."""
    groups: dict[tuple[int, str], list[Record]] = {}
    for entry in samples:
        key = (int(entry.get("iteration") or 0), str(entry.get("split")))
        if entry.get("file") and entry.get("baseline_file") and key[0] > 0:
            groups.setdefault(key, []).append(entry)
    if not groups:
        return [], 0, ""
    key = max(groups, key=lambda key: (key[0], key[1] == "test"))
    if judged:
        wanted = (int(judged.get("iteration") or 0), str(judged.get("split")))
        key = wanted if wanted in groups else key
    rows = groups[key]
    if len(rows) > MAX_PAIRS:
        rows = [rows[i * len(rows) // MAX_PAIRS] for i in range(MAX_PAIRS)]
    return rows, *key


def _video(folder: Path, name: Any, label: str, left: int) -> tuple[str, int]:
    """A video element and the bytes it put into the page."""
    try:
        path = resolve_inside(folder, str(name))
        size = path.stat().st_size
        if size > left:
            source, used = escape(f"samples/{str(name)}", quote=True), 0
        else:
            data = path.read_bytes()
            source, used = "data:video/mp4;base64," + base64.b64encode(data).decode(), len(data)
    except (OSError, FlashGRPOError):
        return '<div class="lost">The video file is missing.</div>', 0
    return (
        f'<video autoplay loop muted playsinline preload="auto" aria-label="{label}" '
        f'src="{source}"></video>',
        used,
    )


def _prompt(entry: Record) -> str:
    prompt = entry.get("prompt")
    text = f"Prompt {prompt}" if isinstance(prompt, int) else str(prompt or "")
    return escape(text if len(text) <= 320 else text[:320].rsplit(" ", 1)[0] + " …")


def _change(entry: Record) -> str:
    after, before = entry.get("reward"), entry.get("baseline_reward")
    if not isinstance(after, (int, float)) or not isinstance(before, (int, float)):
        return ""
    change = after - before
    tone = "up" if change > 0 else "down" if change < 0 else "flat"
    return f' <b class="{tone}">{number(change, signed=True)}</b>'
