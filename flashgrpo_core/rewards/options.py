"""Checks of reward options, and the ways to turn scores of frames into the score of a video."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FlashGRPOError

#: Ways to turn the scores of the frames into one score of the video that menus offer. Any other
#: percentage works as well: `top5`, `bottom20`, `q90`.
AGGREGATES = (
    "mean",
    "median",
    "min",
    "max",
    "top30",
    "bottom30",
    "first",
    "last",
    "top10",
    "bottom10",
    "q10",
    "q25",
    "q75",
    "q90",
)
_PERCENT = re.compile(r"(top|bottom|q)([1-9]\d?|100)")


@dataclass(frozen=True)
class FrameRule:
    """Which frames are scored, and how their scores become the video's."""

    how: str
    every: int

    def pick(self, video: np.ndarray) -> np.ndarray:
        """The frames `[T', H, W, 3]` to score: every n-th of `[T, H, W, 3]`, the first always.

        Of these only the one that counts, when the rule is `first` or `last`.
        """
        picked = video[:: self.every]
        return {"first": picked[:1], "last": picked[-1:]}.get(self.how, picked)

    def needed(self, total: int) -> int:
        """How many leading frames of a video of `total` frames are looked at."""
        return 1 if self.how == "first" else (total - 1) // self.every * self.every + 1

    def total(self, scores: np.ndarray) -> float:
        """The video's score from those of the picked frames, in their order."""
        return aggregate(scores, self.how)


def frame_rule(reward: str, frames: Any, every: Any = 1) -> FrameRule:
    """Check the options `frames` and `every` of a reward that scores frames.

    Args:
        reward: name of the reward, for messages.
        frames: see `aggregate`.
        every: n of "every n-th frame".

    Raises:
        FlashGRPOError: one of them is not usable.
    """
    if frames not in AGGREGATES and not (isinstance(frames, str) and _PERCENT.fullmatch(frames)):
        raise FlashGRPOError(
            f"reward {reward!r}: frames = {frames!r} must be one of {', '.join(AGGREGATES)}, or "
            "another percentage from 1 to 100"
        )
    return FrameRule(frames, int(number(reward, "every", every, 1, 1024)))


def number(reward: str, option: str, value: Any, low: float, high: float) -> float:
    """A number within an inclusive range.

    Raises:
        FlashGRPOError: it is not.
    """
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise FlashGRPOError(
            f"reward {reward!r}: {option} = {value!r} must be a number from {low:g} to {high:g}"
        )
    return float(value)


def choice(reward: str, option: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of several words.

    Raises:
        FlashGRPOError: it is not.
    """
    if value not in choices:
        raise FlashGRPOError(
            f"reward {reward!r}: {option} = {value!r} must be one of {', '.join(choices)}"
        )
    return str(value)


def aggregate(scores: np.ndarray, how: str) -> float:
    """The score of a video from the scores of its frames `[T]`, in their order.

    `topN` and `bottomN` are means of the best and the worst N percent, `k = max(1, round(N/100 *
    T))` frames; `qN` is the quantile at N percent. The best frames alone hide faults in time: put a
    motion term beside `top30` and `max`.

    Raises:
        FlashGRPOError: an unknown `how`.
    """
    simple: dict[str, Callable[[np.ndarray], Any]] = {
        "mean": np.mean,
        "median": np.median,
        "min": np.min,
        "max": np.max,
        "first": lambda values: values[0],
        "last": lambda values: values[-1],
    }
    if how in simple:
        return float(simple[how](scores))
    match = _PERCENT.fullmatch(how)
    if match is None:
        raise FlashGRPOError(f"aggregate = {how!r} must be one of {', '.join(AGGREGATES)}")
    share = int(match[2]) / 100
    if match[1] == "q":
        return float(np.quantile(scores, share))
    count = max(1, round(share * len(scores)))
    ordered = np.sort(scores)
    return float((ordered[-count:] if match[1] == "top" else ordered[:count]).mean())
