"""Checks of reward options, and the ways to turn scores of frames into the score of a video."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import FlashGRPOError

#: Ways to turn the scores of the frames into one score of the video.
AGGREGATES = ("mean", "median", "min", "max", "top30", "bottom30", "first", "last")


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

    `top30` and `bottom30` are means of the best and the worst 30 percent, at least one frame. The
    best frames alone hide faults in time: put a motion term beside `top30` and `max`.

    Raises:
        FlashGRPOError: an unknown `how`.
    """
    share = max(1, round(0.3 * len(scores)))
    match how:
        case "mean":
            return float(scores.mean())
        case "median":
            return float(np.median(scores))
        case "min":
            return float(scores.min())
        case "max":
            return float(scores.max())
        case "top30":
            return float(np.sort(scores)[-share:].mean())
        case "bottom30":
            return float(np.sort(scores)[:share].mean())
        case "first":
            return float(scores[0])
        case "last":
            return float(scores[-1])
    raise FlashGRPOError(f"aggregate = {how!r} must be one of {', '.join(AGGREGATES)}")
