"""Reward of the tiny world: do colour and motion in the pixels agree with the prompt?

Everything is measured from the video, nothing from latents or seeds. The shape is what differs
from the background (the median colour of the clip); its hue and the path of its centroid are
compared with the words of the prompt. A gate asks that there is one compact shape of
plausible size at all, so that neither mush nor a full-screen colour is rewarded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import FlashGRPOError
from ..tiny_world import COLOURS, DIRECTIONS, HUES, PromptFields, parse_prompt

CONTRAST = (0.15, 0.45)  # difference from the background, 0..1: from "background" to "shape"
HUE_TOLERANCE = 60.0  # degrees; neighbouring colours of the world lie this far apart
FULL_SATURATION = 0.5
FULL_SPEED = 1.2  # pixels per frame; clips of the world move at 1.8 to 2.6
MASS = (0.004, 0.02, 0.20, 0.35)  # shape area / frame area: too small, fine ... fine, too large
COMPACTNESS = (0.30, 0.65)  # 1 for a disc, 0.83 for a triangle, near 0 for scattered pixels


class TinyWorldReward:
    """Score clips of the tiny world from their pixels."""

    name = "tiny_world"
    title = "Tiny world"
    description = (
        "Does one coloured shape move as the prompt says? Measures hue and motion from the pixels; "
        "for the embedded tiny Wan, whose prompts read 'a red circle moving left'."
    )
    range = "0 .. 1 (asked colour, asked direction)"
    direction = "higher is better"
    hackable_by = "losing the named shape: only its colour and its motion are measured"
    cost = "0.1 s per frame of 832x480 on one CPU core; no weights"

    def check_prompt(self, prompt: str) -> None:
        """Check that a prompt names a colour and a direction.

        Raises:
            FlashGRPOError: it does not.
        """
        _asked(prompt)

    def score(self, batch: Any) -> dict[str, np.ndarray]:
        """Score a batch of videos.

        Args:
            batch: has ``videos`` (uint8 [B, T, H, W, 3], T >= 2) and ``prompts`` (B strings that
                name a colour and a direction of the tiny world).

        Returns:
            float64 [B] arrays, all 0..1: ``tiny_world.colour`` and ``tiny_world.direction``, and
            their mean ``tiny_world``. A clip of the world scores about 1 for its own caption; a
            wrong colour or direction takes about 0.5 off the mean.

        Raises:
            FlashGRPOError: a prompt names no colour or no direction, or the videos do not have
                the shape above.
        """
        videos = np.asarray(batch.videos)
        if videos.ndim != 5 or videos.shape[-1] != 3 or videos.shape[1] < 2:
            raise FlashGRPOError(
                f"tiny_world reward: videos have shape {videos.shape}, need [B, T >= 2, H, W, 3]; "
                "sample at least 5 frames per video"
            )
        if len(batch.prompts) != len(videos):
            raise FlashGRPOError(
                f"tiny_world reward: {len(batch.prompts)} prompts for {len(videos)} videos; "
                "give one prompt per video"
            )
        asked = [_asked(prompt) for prompt in batch.prompts]
        pairs = [_measure(v, a) for v, a in zip(videos, asked, strict=True)]
        colour, direction = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return {
            "tiny_world": (colour + direction) / 2.0,
            "tiny_world.colour": colour,
            "tiny_world.direction": direction,
        }


def _asked(prompt: str) -> PromptFields:
    fields = parse_prompt(prompt)
    if fields.colour is None:
        raise FlashGRPOError(
            f"tiny_world reward: prompt {prompt!r} names no colour; use one of {', '.join(COLOURS)}"
        )
    if fields.direction is None:
        raise FlashGRPOError(
            f"tiny_world reward: prompt {prompt!r} names no direction; "
            f"use one of {', '.join(DIRECTIONS)}"
        )
    return fields


def _measure(video: np.ndarray, asked: PromptFields) -> tuple[float, float]:
    """Gated colour and direction score of one video, uint8 [T, H, W, 3]."""
    frames = video.astype(np.float64) / 255.0
    # A shape never covers half of the picture, so the median is background.
    background = np.median(video.reshape(-1, 3), axis=0) / 255.0
    contrast = np.abs(frames - background).max(-1)
    weight = _smoothstep(contrast, *CONTRAST)  # [T, H, W], 1 inside the shape
    mass = weight.sum((1, 2))  # [T], pixels
    gate = float(_gate(weight, mass).mean())
    if gate <= 0.0:
        return 0.0, 0.0
    colour = _colour_score(frames, weight, HUES[str(asked.colour)])
    direction = _direction_score(weight, mass, DIRECTIONS[str(asked.direction)])
    return gate * colour, gate * direction


def _smoothstep(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """0 below ``low``, 1 above ``high``, smooth between."""
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return t * t * (3.0 - 2.0 * t)


def _centroids(weight: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Centre (x, y) of the shape per frame, [T, 2]; 0 where there is nothing."""
    safe = np.maximum(mass, 1e-9)
    x = (weight.sum(1) * np.arange(weight.shape[2])).sum(1) / safe
    y = (weight.sum(2) * np.arange(weight.shape[1])).sum(1) / safe
    return np.stack([x, y], 1)


def _gate(weight: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Per frame 0..1: is there one compact shape of plausible size? Shape [T]."""
    area = mass / (weight.shape[1] * weight.shape[2])
    plausible = _smoothstep(area, *MASS[:2]) * (1.0 - _smoothstep(area, *MASS[2:]))
    centre = _centroids(weight, mass)
    x2 = (np.arange(weight.shape[2])[None] - centre[:, :1]) ** 2  # [T, W]
    y2 = (np.arange(weight.shape[1])[None] - centre[:, 1:]) ** 2  # [T, H]
    safe = np.maximum(mass, 1e-9)
    spread = ((weight.sum(1) * x2).sum(1) + (weight.sum(2) * y2).sum(1)) / safe
    # A disc of area A has the smallest possible second moment, A / (2 pi).
    compact = mass / (2.0 * np.pi) / np.maximum(spread, 1e-9)
    return plausible * _smoothstep(compact, *COMPACTNESS)


def _colour_score(frames: np.ndarray, weight: np.ndarray, hue: float) -> float:
    """Share of the shape, pixel by pixel, that has the asked hue and is saturated."""
    seen = weight > 0.0  # most of the picture is background
    weight, frames = weight[seen], frames[seen]  # [N], [N, 3]
    high, low = frames.max(-1), frames.min(-1)
    chroma = np.maximum(high - low, 1e-9)
    red, green, blue = frames.T
    degrees = 60.0 * np.where(
        high == red,
        (green - blue) / chroma,
        np.where(high == green, 2.0 + (blue - red) / chroma, 4.0 + (red - green) / chroma),
    )
    away = np.abs((degrees - hue + 180.0) % 360.0 - 180.0)
    match = 0.5 + 0.5 * np.cos(np.pi * np.minimum(away / HUE_TOLERANCE, 1.0))
    saturated = np.clip((high - low) / np.maximum(high, 1e-9) / FULL_SATURATION, 0.0, 1.0)
    return float((weight * match * saturated).sum() / weight.sum())


def _direction_score(weight: np.ndarray, mass: np.ndarray, direction: tuple[float, float]) -> float:
    """Does the centroid travel in the asked direction, straight and fast enough?

    The velocity is the least-squares slope of the centroid over time, each frame weighted by the
    visible shape. Score = min(1, speed along / full speed) * cos^2 of the angle, 0 backwards.
    """
    time = np.arange(len(mass), dtype=np.float64)
    share = mass / mass.sum()
    centre = _centroids(weight, mass)
    time = time - (share * time).sum()
    variance = (share * time**2).sum()
    if variance < 1e-6:  # visible in one frame only: no motion can be seen
        return 0.0
    velocity = (share * time) @ (centre - share @ centre) / variance  # (x, y) pixels per frame
    along = float(velocity @ np.asarray(direction))
    if along <= 0.0:
        return 0.0
    cosine = along / max(float(np.linalg.norm(velocity)), 1e-9)
    return min(1.0, along / FULL_SPEED) * cosine**2
