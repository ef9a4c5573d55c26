"""The `motion` reward: videos that move, and move smoothly."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from .batch import VideoBatch
from .flow import flow_fields, luma, shrink, warp
from .options import number

# Flow explains half of the change or more in real videos, about a tenth in noise.
_TRUSTED = 0.4


class MotionReward:
    """Dynamic degree times smoothness, both from dense optical flow; no weights.

    With the flow `f_t` between frames `t` and `t+1`, in short sides of the frame per second:

    - `motion.speed` is the mean over all pairs of `v_t * min(1, e_t / 0.4)^2`. `v_t` is the mean
      magnitude of the fastest 5 percent of the pixels (the dynamic degree of VBench, Huang et al.,
      CVPR 2024, as a number). `e_t` is the share of the change between the two frames that moving
      the pixels explains: noise, flicker and scene cuts change the picture but nothing moves.
    - `motion.dynamic` = min(`motion.speed` / enough, 1). VBench calls a video moving from a speed
      of about 0.19 on.
    - `motion.smooth` = 1 - sum|a_t| / (sum|f_t| + sum|g_t| + floor), where `g_t` is the next flow
      followed along `f_t` and `a_t = g_t - f_t` the acceleration. Constant velocity gives 1,
      motion that turns round at every frame 0.
    - `motion.jitter` is the mean magnitude of the largest 5 percent of `a_t`, in short sides per
      second: how much the fastest velocities change from frame to frame.
    - `motion` = `motion.dynamic` * `motion.smooth`.

    A clip of one frame does not move: 0. Clips of two frames have no acceleration: smooth.

    Args:
        enough: speed from which more movement is not rewarded, short sides per second.
        short_side: frames are scaled down to this short side for the flow, pixels.
    """

    name = "motion"
    uses_prompt = False
    parts = ("dynamic", "smooth", "speed", "jitter")
    title = "Motion"
    description = "Rewards movement up to a cap and punishes jitter, measured by optical flow."
    range = "0 (frozen or jittery) .. 1 (enough smooth movement)"
    direction = "higher is better"
    hackable_by = (
        "camera pans, drifting textures and objects sliding along; movement that the prompt does "
        "not ask for. Weigh it against a quality or prompt reward"
    )
    cost = "0.06 s per frame of 832x480 on one CPU core; no weights"

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
            f"{self.name}.jitter": table[:, 2],
        }

    def _measure(self, video: np.ndarray, fps: float) -> tuple[float, float, float]:
        """Speed, smoothness 0..1, and jitter; speeds in short sides per second."""
        grey = shrink(luma(video), self.short_side)
        side = min(grey.shape[-2:])
        if len(grey) < 2:
            return 0.0, 1.0, 0.0
        fastest = max(1, round(0.05 * grey[0].numel()))
        speeds: list[float] = []
        changes: list[float] = []
        acceleration = movement = 0.0
        previous: torch.Tensor | None = None
        for t, flow in enumerate(flow_fields(grey)):
            speed = float(_norm(flow).flatten().topk(fastest).values.mean())
            trust = min(1.0, _explained(grey[t], grey[t + 1], flow) / _TRUSTED)
            speeds.append(speed * trust**2)
            if previous is not None:
                followed = warp(flow, previous)
                change = _norm(followed - previous)
                acceleration += float(change.mean())
                changes.append(float(change.flatten().topk(fastest).values.mean()))
                movement += float((_norm(followed) + _norm(previous)).mean())
            previous = flow
        # Flow below about a fiftieth of a pixel is rounding noise, not jitter.
        floor = 0.02 * max(1, len(speeds) - 1)
        smooth = 1.0 - acceleration / (movement + floor)
        jitter = float(np.mean(changes)) if changes else 0.0
        return float(np.mean(speeds)) / side * fps, smooth, jitter / side * fps


def _norm(flow: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(flow[0] * flow[0] + flow[1] * flow[1])


def _explained(first: torch.Tensor, second: torch.Tensor, flow: torch.Tensor) -> float:
    """Share 0..1 of the change from `first` to `second` that `flow` accounts for."""
    left_over = _rms(warp(second[None], flow)[0] - first)
    changed = _rms(second - first)
    return max(0.0, 1.0 - left_over / changed) if changed > 0 else 0.0


def _rms(difference: torch.Tensor) -> float:
    # Means over 4x4 pixels, so that the softness of interpolation does not count.
    blocks = F.avg_pool2d(difference[None], 4, ceil_mode=True)[0]
    return float(blocks.square().mean().sqrt())
