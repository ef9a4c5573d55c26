"""Decode rollouts and score the videos, a few at a time, without keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .control import Control
from .distributed import World
from .errors import FlashGRPOError
from .groups import PromptGroup
from .rewards.batch import VideoBatch
from .rewards.mix import RewardMix
from .rollout import Rollout
from .wan.vae import decode_latents

#: Receives (prompt, group id, sample index, video uint8 `[T, H, W, 3]`) of each decoded video.
Keep = Callable[[str, str, int, np.ndarray], None]
#: Scores of `n` videos: term values and all reported parts (float64 `[n]` each), valid `[n]`.
Piece = tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Scores:
    """Rewards of an update, arrays `[P, G]`.

    Attributes:
        terms: value of each weighted term, float64.
        weights: weight per term.
        parts: everything that was measured, float64.
        total: weighted sum, float64; NaN where masked.
        valid: bool, False where masked.
    """

    terms: dict[str, np.ndarray]
    weights: dict[str, float]
    parts: dict[str, np.ndarray]
    total: np.ndarray
    valid: np.ndarray


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
) -> Piece:
    """Decode and score latents `[n, C, T, H, W]`.

    Returns:
        Term values, all reported parts (float64 `[n]` each), and the valid mask `[n]`.
    """
    pieces = []
    for start in range(0, len(latents), decode_batch):
        stop = min(start + decode_batch, len(latents))
        control.check()
        videos = decode_latents(vae, latents[start:stop])  # [b, T, H, W, 3]
        batch = VideoBatch(videos, list(prompts[start:stop]), fps, list(group_ids[start:stop]))
        scores = reward.score(batch, control)
        pieces.append(scores)
        if keep is not None:
            for i, video in enumerate(videos):
                keep(start + i, video)
        control.tick(stop - start)
    terms = {k: np.concatenate([p.terms[k] for p in pieces]) for k in pieces[0].terms}
    parts = {k: np.concatenate([p.parts[k] for p in pieces]) for k in pieces[0].parts}
    return terms, parts, np.concatenate([p.valid for p in pieces])


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
    pieces: list[tuple[Rollout, Piece]] = []
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
        )
        pieces.append((rollout, piece))
    return gather_scores(groups, pieces, reward, world)


def gather_scores(
    groups: Sequence[PromptGroup],
    pieces: Sequence[tuple[Rollout, Piece]],
    reward: RewardMix,
    world: World,
) -> Scores:
    """Put this rank's scored rollouts into arrays `[P, G]` and add up those of all ranks."""
    shape = (len(groups), groups[0].size)
    index = {group.group_id: p for p, group in enumerate(groups)}
    labels = reward.labels
    terms = {label: np.zeros(shape) for label in labels}
    valid = np.zeros(shape)
    parts: dict[str, np.ndarray] = {}
    for rollout, (got, reported, ok) in pieces:
        row = index[rollout.group.group_id]
        columns = slice(rollout.samples.start, rollout.samples.stop)
        for label in labels:
            terms[label][row, columns] = got[label]
        for label, value in reported.items():
            parts.setdefault(label, np.zeros(shape))[row, columns] = value
        valid[row, columns] = ok
    if world.size > 1:
        # Parts are for display; a rank without rollouts does not know their names, so they stay.
        parts = {}
    merged = world.sum_array(np.stack([*[terms[label] for label in labels], valid]))
    terms = dict(zip(labels, merged[:-1], strict=True))
    mask = merged[-1] > 0.5
    weights = reward.weights
    total = np.where(
        mask, sum(weights[k] * np.where(mask, v, 0.0) for k, v in terms.items()), np.nan
    )
    return Scores(terms, weights, parts, total, mask)
