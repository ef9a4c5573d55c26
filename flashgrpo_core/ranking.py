"""Score and rank videos that exist already, without any model of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .control import Control
from .errors import FlashGRPOError
from .prompts import parse_prompts
from .rewards.batch import VideoBatch
from .rewards.mix import Measured, RewardMix

#: Endings of files that count as videos.
VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif", ".m4v"}


@dataclass(frozen=True, eq=False)
class Clip:
    """A video that is read when it is its turn.

    Attributes:
        name: what to call it.
        prompt: what it should show.
        read: gives uint8 `[T, H, W, 3]` and frames per second.
    """

    name: str
    prompt: str
    read: Callable[[], tuple[np.ndarray, float]]


@dataclass(frozen=True, eq=False)
class Ranked:
    """A scored video.

    Attributes:
        clip: the video.
        total: weighted sum; NaN when a score failed.
        terms: value of each term.
        parts: everything that was measured.
        frames: number of frames.
        fps: frames per second.
        middle: its middle frame, uint8 `[1, H, W, 3]`.
    """

    clip: Clip
    total: float
    terms: dict[str, float]
    parts: dict[str, float]
    frames: int
    fps: float
    middle: np.ndarray


def rank_videos(
    clips: Sequence[Clip], reward: RewardMix, control: Control | None = None
) -> list[Ranked]:
    """Score videos one after the other; best first, failed ones last.

    Videos of one prompt are the group in which win rates and diversity are taken.

    Args:
        clips: the videos, at least one; sizes and lengths may differ.
        reward: the reward mix.
        control: the host.

    Raises:
        FlashGRPOError: a video cannot be read, or a reward failed and is not masked.
    """
    control = control or Control()
    measured: list[Measured] = []
    about: list[tuple[int, float, np.ndarray]] = []
    for clip in clips:
        control.check()
        video, fps = clip.read()
        try:
            measured.append(
                reward.measure(VideoBatch(video[None], [clip.prompt], fps, [""]), control)
            )
        except FlashGRPOError as exc:
            raise FlashGRPOError(f"{clip.name}: {exc}") from None
        about.append((len(video), fps, video[len(video) // 2][None].copy()))
        control.tick()
    scores = reward.compare(Measured.joined(measured), [clip.prompt for clip in clips])
    ranked = [
        Ranked(
            clip,
            float(scores.total[i]),
            {label: float(values[i]) for label, values in scores.terms.items()},
            {label: float(values[i]) for label, values in scores.parts.items()},
            *about[i],
        )
        for i, clip in enumerate(clips)
    ]
    return sorted(ranked, key=lambda r: np.inf if np.isnan(r.total) else -r.total)


def videos_in(path: Path) -> list[Path]:
    """The video files of a folder in the order of their names, or the one file.

    Raises:
        FlashGRPOError: there is no video.
    """
    if path.is_dir():
        files = [p for p in path.iterdir() if p.suffix.lower() in VIDEO_SUFFIXES and p.is_file()]
        if not files:
            raise FlashGRPOError(f"{str(path)!r} holds no video: name a folder with .mp4 files")
        return sorted(files)
    if not path.is_file():
        raise FlashGRPOError(f"video {str(path)!r} does not exist: check the path")
    return [path]


def prompts_beside(files: Sequence[Path]) -> list[str | None]:
    """The prompts that lie beside video files, None where there is none.

    Looked for are `<name>.txt` beside `<name>.mp4`, then an entry of the folder's `prompts.jsonl`
    (`{"file": ..., "prompt": ...}` a line), then of its `index.json` (a list of the same).

    Raises:
        FlashGRPOError: such a file cannot be read.
    """
    known: dict[Path, dict[str, str]] = {}
    found: list[str | None] = []
    for file in files:
        folder = file.parent
        if folder not in known:
            known[folder] = {**_listed(folder / "index.json"), **_listed(folder / "prompts.jsonl")}
        text = file.with_suffix(".txt")
        if text.is_file():
            prompts = parse_prompts(_read(text).replace("\n", " "), where=str(text))
            found.append(prompts[0].text if prompts else None)
        else:
            found.append(known[folder].get(file.name))
    return found


def listed_prompts(path: Path) -> dict[str, str] | None:
    """Prompts by file name of a `.jsonl` file whose lines name files; None for any other file.

    Raises:
        FlashGRPOError: it cannot be read.
    """
    if path.suffix.lower() != ".jsonl" or not path.is_file() or '"file"' not in _read(path):
        return None
    return _listed(path)


def _listed(path: Path) -> dict[str, str]:
    """Prompt by file name, from a JSON list or JSON lines."""
    if not path.is_file():
        return {}
    text = _read(path)
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        in_lines = path.suffix.lower() == ".jsonl"
        rows = [json.loads(x) for x in lines] if in_lines else json.loads(text)
        return {Path(row["file"]).name: str(row["prompt"]) for row in rows}
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise FlashGRPOError(
            f"{str(path)!r} cannot be read ({exc}): each entry needs file and prompt"
        ) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as exc:
        raise FlashGRPOError(f"{str(path)!r} cannot be read ({exc}): save it as UTF-8") from None
