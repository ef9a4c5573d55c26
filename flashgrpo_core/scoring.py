"""Decode rollouts and score the videos, a few at a time, without keeping them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .control import Control
from .distributed import World
from .errors import FlashGRPOError
from .groups import PromptGroup
from .rewards.batch import VideoBatch
from .rewards.mix import Measured, RewardMix
from .rollout import Rollout
from .wan.decode import decode_latents
from .wan.vae import TEMPORAL

#: Receives (prompt, group id, sample index, video uint8 `[T, H, W, 3]`) of each decoded video.
Keep = Callable[[str, str, int, np.ndarray], None]


@dataclass(frozen=True)
class Scores:
    """Rewards of an update, arrays `[P, G]`.

    Attributes:
        terms: value of each weighted term, float64.
        weights: weight per term.
        parts: everything that was measured, float64.
        total: weighted sum, float64; NaN where masked.
        valid: bool, False where masked.
        compared: for a win rate, the values that were compared, by their own label, float64.
    """

    terms: dict[str, np.ndarray]
    weights: dict[str, float]
    parts: dict[str, np.ndarray]
    total: np.ndarray
    valid: np.ndarray
    compared: dict[str, np.ndarray] = field(default_factory=dict)


def score_latents(
    vae: Any,
    latents: torch.Tensor,
    prompts: Sequence[str],
    group_ids: Sequence[str],
    reward: RewardMix,
    fps: float,
    decode_batch: int,
    control: Control,
    keep: Callable[[int, np.ndarray], None] | None = None,
    kept: Collection[int] | None = None,
) -> Measured:
    """Decode latents `[n, C, T, H, W]`, n at least 1, and measure each video on its own.

    Only the frames that the reward looks at are decoded, except of videos that go to `keep`: those
    at the indices `kept`, by default all.
    """
    pieces = []
    if keep is None:
        kept = ()
    elif kept is None:
        kept = range(len(latents))
    frames = reward.frames_needed(TEMPORAL * (latents.shape[2] - 1) + 1)
    for start in range(0, len(latents), decode_batch):
        stop = min(start + decode_batch, len(latents))
        control.check()
        control.bring(vae)  # a reward model may have taken its place
        shown = [i for i in range(start, stop) if i in kept]
        videos = decode_latents(vae, whole_or_start(latents[start:stop], frames, bool(shown)))
        seen = videos[:, :frames]  # [b, frames, H, W, 3]
        batch = VideoBatch(seen, list(prompts[start:stop]), fps, list(group_ids[start:stop]))
        pieces.append(reward.measure(batch, control))
        if keep is not None:
            for i in shown:
                keep(i, videos[i - start])
        control.tick(stop - start)
    return Measured.joined(pieces)


def whole_or_start(latents: torch.Tensor, frames: int, whole: bool) -> torch.Tensor:
    """Latents `[b, C, t, h, w]`, without those behind the first `frames` frames unless `whole`.

    The VAE is causal in time, so what is left out changes no frame before it.
    """
    return latents if whole else latents[:, :, : -(-(frames - 1) // TEMPORAL) + 1]


def score_rollouts(
    vae: Any,
    groups: Sequence[PromptGroup],
    rollouts: Sequence[Rollout],
    reward: RewardMix,
    *,
    fps: float,
    decode_batch: int = 1,
    control: Control | None = None,
    world: World | None = None,
    keep: Keep | None = None,
) -> Scores:
    """Score this rank's rollouts and gather the numbers (never the videos) of all ranks.

    Args:
        vae: the VAE.
        groups: all groups of the update; they must have equal size G.
        rollouts: this rank's rollouts.
        reward: the reward mix.
        fps: frames per second.
        decode_batch: videos decoded together.
        control: the host.
        world: the processes.
        keep: called with each video before it is dropped.

    Raises:
        FlashGRPOError: a reward failed and is not masked, or groups differ in size.
    """
    control, world = control or Control(), world or World()
    sizes = {group.size for group in groups}
    if len(sizes) != 1:
        raise FlashGRPOError(
            f"groups of sizes {sorted(sizes)} cannot be scored together: use one size"
        )
    pieces: list[tuple[Rollout, Measured]] = []
    for rollout in rollouts:
        group, n = rollout.group, len(rollout.samples)

        def hand_on(i: int, video: np.ndarray, rollout: Rollout = rollout) -> None:
            group, sample = rollout.group, rollout.samples[i]
            if sample == 0:
                control.preview(video, group.prompt)
            if keep is not None:
                keep(group.prompt, group.group_id, sample, video)

        piece = score_latents(
            vae,
            rollout.final,
            [group.prompt] * n,
            [group.group_id] * n,
            reward,
            fps,
            decode_batch,
            control,
            hand_on,
            None if keep is not None else [i for i in range(n) if rollout.samples[i] == 0],
        )
        pieces.append((rollout, piece))
    return gather_scores(groups, pieces, reward, world)


def gather_scores(
    groups: Sequence[PromptGroup],
    pieces: Sequence[tuple[Rollout, Measured]],
    reward: RewardMix,
    world: World,
) -> Scores:
    """Gather what all ranks have measured, then compare inside the groups.

    Args:
        groups: all groups of the update, of equal size G.
        pieces: this rank's rollouts and what was measured of their videos.
        reward: the reward mix.
        world: the processes.
    """
    size = groups[0].size
    count = len(groups) * size
    first = {group.group_id: p * size for p, group in enumerate(groups)}
    # One row per video: terms, valid, and the short feature vectors of group-wise rewards.
    labels, widths = reward.labels, reward.feature_sizes
    table = np.zeros((count, len(labels) + 1 + sum(widths.values())))
    parts: dict[str, np.ndarray] = {}
    for rollout, found in pieces:
        start = first[rollout.group.group_id]
        rows = slice(start + rollout.samples.start, start + rollout.samples.stop)
        columns = [*(found.terms[k] for k in labels), found.valid]
        table[rows] = np.column_stack([*columns, *(found.features[k] for k in widths)])
        for label, value in found.parts.items():
            parts.setdefault(label, np.zeros(count))[rows] = value
    if world.size > 1:
        # Parts are for display; a rank without rollouts does not know their names, so they stay.
        parts = {}
    table = world.sum_array(table)
    features, column = {}, len(labels) + 1
    for label, width in widths.items():
        features[label] = table[:, column : column + width]
        column += width
    terms = dict(zip(labels, table[:, : len(labels)].T, strict=True))
    measured = Measured(terms, features, parts, table[:, len(labels)] > 0.5)
    mixed = reward.compare(measured, np.repeat(np.arange(len(groups)), size))

    def by_group(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: value.reshape(len(groups), size) for key, value in flat.items()}

    return Scores(
        by_group(mixed.terms),
        mixed.weights,
        by_group(mixed.parts),
        mixed.total.reshape(len(groups), size),
        mixed.valid.reshape(len(groups), size),
        by_group(mixed.compared),
    )
