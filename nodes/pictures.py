"""Pictures that nodes show: the curve of a run, the groups, the scored videos, a step's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..flashgrpo_core.advantage import Advantages
from ..flashgrpo_core.groups import PromptGroup
from ..flashgrpo_core.ranking import Ranked
from ..flashgrpo_core.runs.events import latest_each, term_curves
from ..flashgrpo_core.scoring import Scores
from ..flashgrpo_core.video import contact_sheet

BACKGROUND = (24, 26, 30)
INK = (235, 235, 235)
FAINT = (70, 74, 82)
REWARD = (76, 155, 232)
VALIDATION = (240, 162, 60)
BASELINE = (138, 138, 138)

Points = list[tuple[float, float]]


def to_image(picture: Image.Image) -> torch.Tensor:
    """A picture as IMAGE, float32 `[1, H, W, 3]`, 0..1."""
    return torch.from_numpy(np.asarray(picture.convert("RGB"), np.float32) / 255)[None]


def curve(
    events: Sequence[Mapping[str, Any]], title: str, size: tuple[int, int] = (960, 540)
) -> Image.Image:
    """Reward over iterations, with the validation and its interval; below it one chart per term.

    Args:
        events: records of `events.jsonl`.
        title: text above the chart.
        size: pixels.
    """
    rewards = [
        (float(e["iteration"]), float(e["reward"]["mean"]))
        for e in latest_each(events, "iteration")
        if e.get("reward", {}).get("mean") is not None
    ]
    judged = [
        e
        for e in latest_each(events, "evaluation", "split")
        if e.get("split") == "validation" and e.get("reward_mean") is not None
    ]
    test = [e for e in events if e.get("event") == "evaluation" and e.get("split") == "test"]
    values = [y for _, y in rewards]
    for e in judged:
        values += [e["reward_mean"], e["baseline_mean"]]
        values += [e["baseline_mean"] + e[k] for k in ("ci_low", "ci_high") if e[k] is not None]
    picture, draw, font, small = _canvas(size)
    draw.text((16, 12), title, font=font, fill=INK)
    if not values:
        draw.text((16, 60), "no iteration yet", font=small, fill=BASELINE)
        return picture
    low, high = min(values), max(values)
    room = (high - low or abs(high) or 1.0) * 0.08
    last = max(1.0, *(x for x, _ in rewards), *(float(e["iteration"]) for e in judged))
    box = (70, 56, size[0] - 20, size[1] - 66)
    place = _axes(draw, small, box, (0.0, last), (low - room, high + room))
    if judged:
        y = place(0, judged[0]["baseline_mean"])[1]
        for x in range(box[0], box[2], 14):
            draw.line([(x, y), (x + 7, y)], fill=BASELINE, width=2)
    _line(draw, [place(x, y) for x, y in rewards], REWARD)
    for e in judged:
        x, y = place(e["iteration"], e["reward_mean"])
        if e["ci_low"] is not None and e["ci_high"] is not None:
            ends = [place(0, e["baseline_mean"] + e[k])[1] for k in ("ci_low", "ci_high")]
            draw.line([(x, ends[0]), (x, ends[1])], fill=VALIDATION, width=2)
        draw.ellipse([x - 5, y - 5, x + 5, y + 5], fill=VALIDATION)
    legend = [("training reward", REWARD), ("validation, 95 % interval", VALIDATION)]
    legend.append(("before training", BASELINE))
    x = box[0]
    for text, colour in legend:
        draw.line([(x, size[1] - 22), (x + 24, size[1] - 22)], fill=colour, width=4)
        draw.text((x + 32, size[1] - 31), text, font=small, fill=INK)
        x += 60 + int(draw.textlength(text, font=small))
    if test:
        text = "test: " + _change(test[-1])
        # Below the title, which may take the whole width.
        draw.text((size[0] - 20, 37), text, font=small, fill=INK, anchor="ra")
    terms = term_curves(events)
    return _with_terms(picture, terms, judged) if len(terms) > 1 else picture


def _with_terms(
    picture: Image.Image,
    terms: Mapping[str, Sequence[tuple[int, float]]],
    judged: Sequence[Mapping[str, Any]],
) -> Image.Image:
    """The picture with a small chart of each term below it, three in a row."""
    width, height = picture.width // 3, 190
    rows = math.ceil(len(terms) / 3)
    whole = Image.new("RGB", (picture.width, picture.height + rows * height), BACKGROUND)
    whole.paste(picture, (0, 0))
    for index, (name, points) in enumerate(terms.items()):
        panel, draw, _, small = _canvas((width, height))
        draw.text((16, 6), _fit(draw, name, small, width - 24), font=small, fill=INK)
        marks = [
            (float(event["iteration"]), float(event["terms"][name]))
            for event in judged
            if (event.get("terms") or {}).get(name) is not None
        ]
        values = [y for _, y in (*points, *marks)]
        room = (max(values) - min(values) or abs(max(values)) or 1.0) * 0.1
        last = max(1.0, *(x for x, _ in (*points, *marks)))
        box = (70, 32, width - 14, height - 26)
        y_range = (min(values) - room, max(values) + room)
        place = _axes(draw, small, box, (0.0, last), y_range, lines=3)
        _line(draw, [place(x, y) for x, y in points], REWARD)
        for x, y in (place(*mark) for mark in marks):
            draw.ellipse([x - 4, y - 4, x + 4, y + 4], fill=VALIDATION)
        whole.paste(panel, (index % 3 * width, picture.height + index // 3 * height))
    return whole


def _change(event: Mapping[str, Any]) -> str:
    text = f"{event['baseline_mean']:.3f} -> {event['reward_mean']:.3f}"
    if event.get("ci_low") is None or event.get("ci_high") is None:
        return text
    return f"{text} ({event['difference']:+.3f}, 95 % {event['ci_low']:+.3f} to {event['ci_high']:+.3f})"


def groups(picked: Sequence[PromptGroup], sigmas: Sequence[float], title: str) -> Image.Image:
    """Which prompt is stochastic at which sigma."""
    row, top = 34, 60
    picture, draw, font, small = _canvas((960, top + row * len(picked) + 56))
    draw.text((16, 12), title, font=font, fill=INK)
    left, right = 560, 940
    high, low = max(sigmas), min(sigmas)

    def place(sigma: float) -> float:
        return left + (high - sigma) / ((high - low) or 1.0) * (right - left)

    for index, group in enumerate(picked):
        y = top + row * index + row / 2
        draw.text((16, y), _fit(draw, group.prompt, small, 430), font=small, fill=INK, anchor="lm")
        draw.text((545, y), f"{group.size} videos", font=small, fill=BASELINE, anchor="rm")
        draw.line([(left, y), (right, y)], fill=FAINT, width=1)
        for sigma in sigmas:
            x = place(sigma)
            draw.line([(x, y - 4), (x, y + 4)], fill=FAINT)
        x = place(float(sigmas[group.sde_step]))
        draw.ellipse([x - 7, y - 7, x + 7, y + 7], fill=VALIDATION)
        draw.text((x, y - 13), f"{sigmas[group.sde_step]:.2f}", font=small, fill=INK, anchor="mm")
    bottom = top + row * len(picked) + 14
    draw.text((left, bottom), "noise (sigma 1)", font=small, fill=BASELINE)
    draw.text((right, bottom), "video (sigma 0)", font=small, fill=BASELINE, anchor="ra")
    return picture


def rollout_sheet(
    frames: Sequence[np.ndarray], captions: Sequence[str], columns: int
) -> Image.Image:
    """One frame of each video, uint8 `[1, H, W, 3]` each, groups in rows."""
    return contact_sheet(frames, columns, captions, tile=_tile(columns))


def scored_sheet(
    picked: Sequence[PromptGroup],
    frames: Mapping[tuple[str, int], np.ndarray],
    scores: Scores,
    advantages: Advantages,
) -> Image.Image:
    """The videos of each group, best first, with reward and advantage; groups in rows."""
    shown, captions = [], []
    columns = max(group.size for group in picked)
    for p, group in enumerate(picked):
        total = scores.total[p]
        order = sorted(range(group.size), key=lambda s: -np.nan_to_num(total[s], nan=-math.inf))
        spread = float(np.nanstd(total)) if np.isfinite(total).any() else math.nan
        for rank, s in enumerate(order):
            shown.append(frames[group.group_id, s])
            mark = "" if advantages.used[p, s] else " (not used)"
            text = f"reward {total[s]:.3f}  advantage {advantages.values[p, s]:+.2f}{mark}"
            captions.append(f"{text} | {group.prompt}, spread {spread:.3f}" if not rank else text)
    return contact_sheet(shown, columns, captions, tile=_tile(columns))


def ranked_sheet(ranked: Sequence[Ranked]) -> Image.Image:
    """One frame of each ranked video, best first, with its scores."""
    columns = min(len(ranked), max(2, math.ceil(math.sqrt(len(ranked)))))
    captions = []
    for rank, video in enumerate(ranked, start=1):
        terms = "  ".join(f"{name} {value:.3f}" for name, value in video.terms.items())
        captions.append(f"{rank}. {video.total:.3f}  {video.clip.name} | {terms}")
    return contact_sheet([video.middle for video in ranked], columns, captions, tile=_tile(columns))


def ranked_text(ranked: Sequence[Ranked]) -> str:
    """The scores as lines of tab-separated values, best first."""
    names = list(ranked[0].terms)
    lines = ["\t".join(("rank", "video", "total", *names))]
    for rank, video in enumerate(ranked, start=1):
        values = [f"{value:.6g}" for value in (video.total, *video.terms.values())]
        lines.append("\t".join((str(rank), video.clip.name, *values)))
    return "\n".join(lines)


def metrics(rows: Iterable[tuple[str, str]], title: str) -> Image.Image:
    """A table of names and values."""
    rows = list(rows)
    picture, draw, font, small = _canvas((720, 64 + 30 * len(rows)))
    draw.text((16, 12), title, font=font, fill=INK)
    for index, (name, value) in enumerate(rows):
        y = 56 + 30 * index
        draw.text((16, y), name, font=small, fill=BASELINE)
        draw.text((250, y), _fit(draw, value, small, 450), font=small, fill=INK)
    return picture


def _tile(columns: int) -> int:
    return max(96, min(256, 1536 // columns))


def _canvas(size: tuple[int, int]) -> tuple[Image.Image, Any, Any, Any]:
    picture = Image.new("RGB", size, BACKGROUND)
    return picture, ImageDraw.Draw(picture), ImageFont.load_default(22), ImageFont.load_default(16)


def _fit(draw: Any, text: str, font: Any, width: float) -> str:
    text = " ".join(text.split())
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(f"{text}...", font=font) > width:
        text = text[:-1]
    return f"{text}..."


def _axes(
    draw: Any,
    font: Any,
    box: tuple[int, int, int, int],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    lines: int = 6,
) -> Any:
    """Draw axes with round numbers; returns the function that places a point."""
    left, top, right, bottom = box

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x_range[0]) / (x_range[1] - x_range[0]) * (right - left),
            bottom - (y - y_range[0]) / (y_range[1] - y_range[0]) * (bottom - top),
        )

    for value, text in _ticks(*y_range, lines):
        y = place(0, value)[1]
        draw.line([(left, y), (right, y)], fill=FAINT)
        draw.text((left - 8, y), text, font=font, fill=INK, anchor="rm")
    for value, _ in _ticks(*x_range, lines + 2):
        if value == int(value):
            x = place(value, 0)[0]
            draw.text((x, bottom + 8), str(int(value)), font=font, fill=INK, anchor="ma")
    return place


def _ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(low / step)
    found = []
    while first * step <= high * (1 + 1e-12) + 1e-12:
        found.append((first * step, f"{first * step:.{digits}f}"))
        first += 1
    return found


def _line(draw: Any, points: Points, colour: tuple[int, int, int]) -> None:
    if len(points) > 1:
        draw.line(points, fill=colour, width=3, joint="curve")
    if len(points) <= 12:
        for x, y in points:
            draw.ellipse([x - 4, y - 4, x + 4, y + 4], fill=colour)
