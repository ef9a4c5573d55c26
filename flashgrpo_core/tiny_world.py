"""The synthetic world that the embedded tiny Wan was trained on.

One flat-coloured shape on a plain dark background moves in one direction at constant speed. A
clip is nine frames of 64x64 at 8 frames per second, its caption reads ``a red circle moving
left``. The world is small enough to be learnt on a CPU in minutes and still has what
reinforcement learning of a video model needs: an appearance (colour, shape) and a motion that a
prompt names, and that can be measured from the pixels (see ``rewards/tiny_world.py``).

Only numpy is used. Pixel coordinates: x grows to the right, y grows downwards.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

FRAMES = 9
HEIGHT = 64
WIDTH = 64
FPS = 8

# The six fully saturated hues lie 60 degrees apart, so "how far from the asked colour" is an
# angle with the same meaning for every colour.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (235, 40, 40),
    "green": (40, 235, 40),
    "blue": (40, 40, 235),
    "yellow": (235, 235, 40),
    "magenta": (235, 40, 235),
    "cyan": (40, 235, 235),
}
HUES: dict[str, float] = {
    "red": 0.0,
    "yellow": 60.0,
    "green": 120.0,
    "cyan": 180.0,
    "blue": 240.0,
    "magenta": 300.0,
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}

RADIUS_RANGE = (11.0, 14.0)  # pixels
SPEED_RANGE = (1.8, 2.3)  # pixels per frame
WIDE_RADIUS_RANGE = (9.0, 13.0)
WIDE_SPEED_RANGE = (1.8, 2.6)
MIDDLE_RANGE = 6.0  # the middle of the path lies this near to the middle of the frame, pixels


class PromptFields(NamedTuple):
    """What a prompt asks for; a field the prompt does not name is None."""

    colour: str | None
    shape: str | None
    direction: str | None


def caption(colour: str, shape: str, direction: str) -> str:
    """The caption of a clip, for example ``a red circle moving left``."""
    return f"a {colour} {shape} moving {direction}"


def parse_prompt(prompt: str) -> PromptFields:
    """Find the colour, the shape and the direction that a prompt names.

    Words are compared whole and without case; the first word of each kind counts.

    Args:
        prompt: any text.

    Returns:
        The three fields, each None where the prompt names none.
    """
    words = re.findall(r"[a-z]+", prompt.lower())

    def first(known: object) -> str | None:
        return next((word for word in words if word in known), None)  # type: ignore[operator]

    return PromptFields(first(COLOURS), first(SHAPES), first(DIRECTIONS))


def all_prompts() -> list[str]:
    """All 72 captions, in a fixed order (colour, then shape, then direction)."""
    return [
        caption(colour, shape, direction)
        for colour in COLOURS
        for shape in SHAPES
        for direction in DIRECTIONS
    ]


def split_prompts() -> dict[str, list[str]]:
    """Disjoint ``train`` (48), ``validation`` (12) and ``test`` (12) captions.

    The split is a Latin pattern, so that validation and test each hold every colour twice, every
    shape four times and every direction three times. The train list is ordered so that its first
    prompts already differ in colour, shape and direction.
    """
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    colours, shapes, directions = list(COLOURS), list(SHAPES), list(DIRECTIONS)
    for turn in range(12):
        for c, colour in enumerate(colours):
            # 3 and 4 share no factor, so the twelve turns meet each (shape, direction) once.
            s, d = (c + turn) % 3, (c + turn) % 4
            kind = (c + 2 * s + d) % 6
            part = {0: "validation", 1: "test"}.get(kind, "train")
            parts[part].append(caption(colour, shapes[s], directions[d]))
    return parts


def render_clip(
    colour: str,
    shape: str,
    direction: str,
    rng: np.random.Generator,
    *,
    anywhere: bool = False,
) -> np.ndarray:
    """Render one clip; position, size, speed, brightness and background are drawn from ``rng``.

    Args:
        colour: a key of ``COLOURS``.
        shape: one of ``SHAPES``.
        direction: a key of ``DIRECTIONS``.
        rng: source of the random draws.
        anywhere: draw from wider ranges of place, size and speed than the world has. The VAE is
            taught with these, so that it does not depend on where things usually are.

    Returns:
        uint8 array [9, 64, 64, 3]. The shape stays inside the frame in all frames.
    """
    radius = rng.uniform(*(WIDE_RADIUS_RANGE if anywhere else RADIUS_RANGE))
    speed = rng.uniform(*(WIDE_SPEED_RANGE if anywhere else SPEED_RANGE))
    step = np.array(DIRECTIONS[direction]) * speed  # (x, y) pixels per frame
    travel = step * (FRAMES - 1)
    corner = np.array([WIDTH - 1, HEIGHT - 1], dtype=np.float64)
    if anywhere:
        margin = radius + 1.0
        low = margin - np.minimum(travel, 0.0)
        high = corner - margin - np.maximum(travel, 0.0)
        start = rng.uniform(low, high)
    else:
        start = (corner - travel) / 2.0 + rng.uniform(-1.0, 1.0, 2) * MIDDLE_RANGE
    background = rng.uniform(0.05, 0.13) + rng.uniform(-0.02, 0.02, size=3)
    paint = np.array(COLOURS[colour]) / 255.0 * rng.uniform(0.88, 1.0)

    centres = start + step * np.arange(FRAMES)[:, None]  # [T, 2]
    x = np.arange(WIDTH)[None, None, :] - centres[:, 0, None, None]  # [T, 1, W]
    y = np.arange(HEIGHT)[None, :, None] - centres[:, 1, None, None]  # [T, H, 1]
    # A pixel's coverage falls from 1 to 0 over one pixel around the outline: anti-aliasing.
    coverage = np.clip(0.5 - _signed_distance(shape, x, y, radius), 0.0, 1.0)[..., None]
    frames = coverage * paint + (1.0 - coverage) * background  # [T, H, W, 3]
    return np.round(np.clip(frames, 0.0, 1.0) * 255.0).astype(np.uint8)


def _signed_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Distance in pixels from the outline, negative inside; centred at the origin."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.85 * radius
    if shape == "triangle":
        # Equilateral, tip up: three edges at the distance of the inner radius.
        slanted = np.abs(x) * np.sqrt(0.75) - 0.5 * y
        return np.maximum(slanted, y) - 0.56 * radius
    raise ValueError(f"unknown shape {shape!r}; use one of {', '.join(SHAPES)}")
