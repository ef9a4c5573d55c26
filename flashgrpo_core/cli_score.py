"""`flashgrpo score`: rank existing videos."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .cli_common import Answer, reward_terms, table
from .errors import FlashGRPOError
from .lookup import resolve_terms
from .prompts import read_prompts
from .ranking import Clip, listed_prompts, prompts_beside, rank_videos, videos_in
from .rewards.mix import RewardMix, default_terms
from .runs.charts import number
from .video import read_video


def score(args: Namespace) -> Answer:
    """Score videos with rewards, best first."""
    files = videos_in(Path(args.videos))
    models = None if args.models is None else Path(args.models).expanduser()
    terms = resolve_terms(reward_terms(args.reward), Path.cwd(), models)
    mix = RewardMix(terms or default_terms(tiny=False), args.on_nan)
    prompts = _prompts_for(files, args, mix)
    ranked = rank_videos(
        [
            Clip(str(file), prompt, partial(read_video, file, args.max_frames))
            for file, prompt in zip(files, prompts, strict=True)
        ],
        mix,
    )
    results: list[dict[str, Any]] = [
        {
            "file": r.clip.name,
            "rank": rank,
            "prompt": r.clip.prompt,
            "total": r.total,
            "terms": r.terms,
            "parts": r.parts,
            "frames": r.frames,
            "fps": r.fps,
        }
        for rank, r in enumerate(ranked, start=1)
    ]
    some = [r for r in ranked if not np.isnan(r.total)]
    means = {k: _mean([r.terms[k] for r in some]) for k in mix.labels}
    total = _mean([r.total for r in some])
    rows = [["video", *mix.labels, "total"]]
    for r in ranked:
        values = [number(r.terms[label]) for label in mix.labels]
        rows.append([Path(r.clip.name).name, *values, number(r.total)])
    if len(ranked) > 1:
        rows.append(["mean", *(number(means[label]) for label in mix.labels), number(total)])
    data = {"videos": results, "mean": {"total": total, "terms": means}, "weights": mix.weights}
    return Answer(table(rows), data)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _prompts_for(files: list[Path], args: Namespace, mix: RewardMix) -> list[str]:
    """One prompt per file: the given one for all, a file's, or what lies beside the videos."""
    if args.prompt is not None:
        return [args.prompt] * len(files)
    if args.prompts:
        listed = listed_prompts(Path(args.prompts))
        if listed is not None:
            found: list[str | None] = [listed.get(file.name) for file in files]
        else:
            lines = [p.text for p in read_prompts(args.prompts)]
            if len(lines) != len(files):
                raise FlashGRPOError(
                    f"{args.prompts!r} holds {len(lines)} prompts for {len(files)} videos: give "
                    "one per video in the order of the file names"
                )
            return lines
    else:
        found = prompts_beside(files)
    missing = [file.name for file, prompt in zip(files, found, strict=True) if prompt is None]
    if missing and any(getattr(r, "uses_prompt", True) for r in mix.rewards):
        raise FlashGRPOError(f"no prompt is known for {missing[0]!r}: give --prompt or --prompts")
    return [prompt or "" for prompt in found]
