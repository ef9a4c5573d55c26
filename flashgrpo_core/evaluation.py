"""Held-out evaluation that does not flatter.

Videos are made with the plain ODE sampler from fixed seeds, the policy's and the starting
policy's from the same noise. Validation prompts choose the checkpoint; disjoint test prompts are
judged once, and their interval resamples prompts, not videos: with no real effect at all, the best
of ten evaluations quoted with its own interval would look significant in about 28 % of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .conditioning import StartImage, find_image
from .control import Control
from .distributed import World
from .experts import Policy
from .groups import prompt_key
from .ode import OdeJob, sample_all_ode
from .prompts import Prompt
from .rewards.mix import RewardMix
from .rollout import RolloutSettings
from .schedule import Schedule
from .scoring import score_latents
from .seeds import derive_seed

#: Receives (prompt index, seed index, video uint8 `[T, H, W, 3]`, total reward).
KeepVideo = Callable[[int, int, np.ndarray, float], None]


@dataclass(frozen=True)
class EvalScores:
    """Rewards of an evaluation.

    Attributes:
        total: float64 `[prompts, seeds]`, NaN where masked.
        terms: the same per term.
    """

    total: np.ndarray
    terms: dict[str, np.ndarray]

    @property
    def mean(self) -> float:
        """Mean reward over prompts of each prompt's mean over seeds."""
        return float(np.nanmean(np.nanmean(self.total, axis=1)))

    def to_json(self) -> dict[str, Any]:
        """Plain lists, for the checkpoint state."""
        return {
            "total": _listed(self.total),
            "terms": {k: _listed(v) for k, v in self.terms.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> EvalScores:
        """The inverse of `to_json`."""
        return cls(
            np.array(record["total"], np.float64),
            {k: np.array(v, np.float64) for k, v in record["terms"].items()},
        )


def _listed(array: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(v) else float(v) for v in row] for row in array]


def video_seed(run_seed: int, split: str, prompt: Prompt, index: int) -> int:
    """Initial-noise seed of one evaluation video; the same for every policy and iteration."""
    return derive_seed(run_seed, split, prompt_key(prompt.text, prompt.image), index, "evaluation")


def evaluate(
    policy: Policy,
    vae: Any,
    prompts: Sequence[Prompt],
    seeds: int,
    reward: RewardMix,
    schedule: Schedule,
    settings: RolloutSettings,
    context: Callable[[str], torch.Tensor],
    negative: torch.Tensor | None,
    *,
    run_seed: int,
    split: str,
    fps: float,
    decode_batch: int = 1,
    control: Control | None = None,
    world: World | None = None,
    keep: KeepVideo | None = None,
    images: Callable[[str], StartImage] | None = None,
) -> EvalScores:
    """Sample and score `seeds` videos of each prompt with the current weights of the policy.

    All latents are made before the first is decoded, so that the transformer and the VAE are
    needed one after the other.
    """
    control, world = control or Control(), world or World()
    shape = (len(prompts), seeds)
    mine = world.deal(range(len(prompts)))
    jobs = [
        OdeJob(
            [video_seed(run_seed, split, prompts[p], s) for s in range(seeds)],
            context(prompts[p].text),
            find_image(images, prompts[p].image),
        )
        for p in mine
    ]
    found = sample_all_ode(policy, jobs, schedule, settings, negative, control)
    latents = dict(zip(mine, found, strict=True))
    world.rest()
    control.bring(vae)
    labels = reward.labels
    terms = {label: np.zeros(shape) for label in labels}
    valid = np.zeros(shape)
    for p, final in latents.items():
        shown: dict[int, np.ndarray] = {}
        # A prompt's videos are its group, and all of them are here.
        measured = score_latents(
            vae,
            final,
            [prompts[p].text] * seeds,
            [prompt_key(prompts[p].text)] * seeds,
            reward,
            fps,
            decode_batch,
            control,
            shown.__setitem__ if keep else None,
        )
        scores = reward.compare(measured, [p] * seeds)
        for label in labels:
            terms[label][p] = scores.terms[label]
        valid[p] = scores.valid
        if keep is not None:
            for s, video in shown.items():
                keep(p, s, video, float(scores.total[s]))
    merged = world.sum_array(np.stack([*[terms[label] for label in labels], valid]))
    mask = merged[-1] > 0.5
    terms = {
        label: np.where(mask, value, np.nan)
        for label, value in zip(labels, merged[:-1], strict=True)
    }
    total = np.where(
        mask, sum(reward.weights[k] * np.where(mask, v, 0.0) for k, v in terms.items()), np.nan
    )
    return EvalScores(total, terms)


def paired_interval(
    after: np.ndarray,
    before: np.ndarray,
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = 10000,
) -> tuple[float, float, float]:
    """Mean paired difference and its bootstrap percentile interval, resampling prompts.

    Args:
        after: rewards `[prompts, seeds]` of the trained policy.
        before: rewards of the starting policy for the same noise.
        seed: seed of the resampling.
        level: coverage of the interval.
        resamples: bootstrap resamples.

    Returns:
        `(difference, low, high)`; NaN when no pair is valid, an interval of NaN for one prompt.
    """
    with np.errstate(all="ignore"):
        rows = ~np.all(np.isnan(after - before), axis=1)
    per_prompt = np.nanmean((after - before)[rows], axis=1) if rows.any() else np.empty(0)
    if per_prompt.size == 0:
        return float("nan"), float("nan"), float("nan")
    difference = float(per_prompt.mean())
    if per_prompt.size == 1:
        return difference, float("nan"), float("nan")
    rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
    picks = rng.integers(per_prompt.size, size=(resamples, per_prompt.size))
    means = per_prompt[picks].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return difference, float(low), float(high)
