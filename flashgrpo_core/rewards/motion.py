"""The `motion` reward: videos that move, and move smoothly."""

from __future__ import annotations

import numpy as np
import torch

from .batch import VideoBatch
from .flow import flow_fields, luma, shrink, warp
from .options import number


class MotionReward:
    """Dynamic degree times smoothness, both from dense optical flow; no weights.

    With the flow `f_t` between frames `t` and `t+1`, in short sides of the frame per second:

    - `motion.dynamic` = min(v / enough, 1), where `v` is the mean over all pairs of the mean
      magnitude of the fastest 5 percent of the pixels (the dynamic degree of VBench, Huang et al.,
      CVPR 2024, made continuous). VBench calls a video moving from about 0.19 on.
    - `motion.smooth` = 1 - sum|a_t| / (sum|f_t| + sum|g_t| + floor), where `g_t` is the next flow
      followed along `f_t` and `a_t = g_t - f_t` the acceleration. Constant velocity gives 1,
      motion that turns round at every frame 0, noise something in between.
    - `motion` = `motion.dynamic` * `motion.smooth`.

    A clip of one frame does not move: 0. Clips of two frames have no acceleration: smooth.

    Args:
        enough: speed from which more movement is not rewarded, short sides per second.
        short_side: frames are scaled down to this short side for the flow, pixels.
    """

    name = "motion"
    title = "Motion"
    description = "Rewards movement up to a cap and punishes jitter, measured by optical flow."
    range = "0 (frozen or jittery) .. 1 (enough smooth movement)"
    direction = "higher is better"
    hackable_by = (
        "camera pans, drifting textures and objects sliding along; movement that the prompt does "
        "not ask for. Weigh it against a quality or prompt reward"
    )

    def __init__(self, enough: float = 0.5, short_side: int = 128) -> None:
        self.enough = number(self.name, "enough", enough, 0.01, 100.0)
        self.short_side = int(number(self.name, "short_side", short_side, 32, 512))

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        """See the class."""
        rows = [self._measure(video, batch.fps) for video in batch.videos]
        table = np.array(rows, dtype=np.float64).reshape(-1, 3)
        dynamic = np.minimum(table[:, 0] / self.enough, 1.0)
        smooth = table[:, 1]
        return {
            self.name: dynamic * smooth,
            f"{self.name}.dynamic": dynamic,
            f"{self.name}.smooth": smooth,
            f"{self.name}.speed": table[:, 0],
            f"{self.name}.explained": table[:, 2],
        }

    def _measure(self, video: np.ndarray, fps: float) -> tuple[float, float, float]:
        """Speed (short sides per second), smoothness 0..1 and share of explained change 0..1."""
        grey = shrink(luma(video), self.short_side)
        side = min(grey.shape[-2:])
        if len(grey) < 2:
            return 0.0, 1.0, 1.0
        fastest = max(1, round(0.05 * grey[0].numel()))
        speeds: list[float] = []
        acceleration = movement = changed = left_over = 0.0
        previous: torch.Tensor | None = None
        for t, flow in enumerate(flow_fields(grey)):
            magnitude = _norm(flow)
            speeds.append(float(magnitude.flatten().topk(fastest).values.mean()))
            left_over += float((warp(grey[t + 1][None], flow)[0] - grey[t]).abs().mean())
            changed += float((grey[t + 1] - grey[t]).abs().mean())
            if previous is not None:
                followed = warp(flow, previous)
                acceleration += float(_norm(followed - previous).mean())
                movement += float((_norm(followed) + _norm(previous)).mean())
            previous = flow
        # Flow below about a fiftieth of a pixel is rounding noise, not jitter.
        floor = 0.02 * max(1, len(speeds) - 1)
        smooth = 1.0 - acceleration / (movement + floor)
        explained = min(1.0, max(0.0, 1.0 - left_over / (changed + 1e-6))) if changed else 1.0
        return float(np.mean(speeds)) / side * fps, smooth, explained


def _norm(flow: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(flow[0] * flow[0] + flow[1] * flow[1])
