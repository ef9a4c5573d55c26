"""What a reward sees: decoded videos with their prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FlashGRPOError


@dataclass(frozen=True, eq=False)
class VideoBatch:
    """Videos to be scored. Checked when it is made, so that rewards need not check again.

    Attributes:
        videos: uint8 RGB, `[B, T, H, W, 3]`; `B` may be 0, the other sizes may not.
        prompts: the `B` prompts the videos were sampled from.
        fps: frames per second of all videos.
        group_ids: the `B` group ids; equal ids are rollouts of one prompt.
        start_images: for image-to-video, per video the uint8 RGB start image `[H, W, 3]` or None.

    Raises:
        FlashGRPOError: a wrong type, shape, length or rate.
    """

    videos: np.ndarray
    prompts: list[str]
    fps: float
    group_ids: list[str]
    start_images: list[np.ndarray | None] | None = None

    def __post_init__(self) -> None:
        check_videos(self.videos)
        count = len(self.videos)
        for name, values in (("prompts", self.prompts), ("group_ids", self.group_ids)):
            if isinstance(values, str) or not all(isinstance(v, str) for v in values):
                raise FlashGRPOError(f"{name} of a video batch must be a list of strings")
            if len(values) != count:
                raise FlashGRPOError(
                    f"a video batch has {count} videos but {len(values)} {name}: give one per video"
                )
        if not _is_number(self.fps) or not math.isfinite(self.fps) or self.fps <= 0:
            raise FlashGRPOError(f"fps = {self.fps!r} of a video batch must be a number above 0")
        if self.start_images is None:
            return
        if len(self.start_images) != count:
            raise FlashGRPOError(
                f"a video batch has {count} videos but {len(self.start_images)} start images: "
                "give one (or None) per video"
            )
        for index, image in enumerate(self.start_images):
            if image is None:
                continue
            good = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3
            if not good or image.shape[2] != 3 or 0 in image.shape:
                raise FlashGRPOError(
                    f"start image {index} is {_describe(image)}: it must be uint8 [H, W, 3]"
                )

    def __len__(self) -> int:
        return len(self.videos)

    def select(self, indices: Sequence[int]) -> VideoBatch:
        """The videos at `indices`, in that order, with everything that belongs to them."""
        starts = self.start_images
        return VideoBatch(
            videos=self.videos[list(indices)] if len(indices) else self.videos[:0],
            prompts=[self.prompts[i] for i in indices],
            fps=self.fps,
            group_ids=[self.group_ids[i] for i in indices],
            start_images=None if starts is None else [starts[i] for i in indices],
        )


def check_videos(videos: Any) -> None:
    """Check that `videos` is uint8 `[B, T, H, W, 3]` with at least one frame and pixel.

    Raises:
        FlashGRPOError: it is not.
    """
    good = isinstance(videos, np.ndarray) and videos.dtype == np.uint8 and videos.ndim == 5
    if not good or videos.shape[4] != 3 or 0 in videos.shape[1:]:
        raise FlashGRPOError(
            f"the videos are {_describe(videos)}: they must be uint8 [B, T, H, W, 3] (RGB, 0..255)"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"of type {type(value).__name__}"
