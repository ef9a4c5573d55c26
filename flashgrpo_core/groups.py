"""Iso-temporal groups: which prompts an iteration samples, and where each one is stochastic.

All videos of a prompt share one SDE step, so that their rewards differ by what the policy did and
not by how hard the step was (iso-temporal grouping, arXiv 2605.15980). Different prompts draw
different steps: an update that sees a single noise level collapses.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from .errors import FlashGRPOError
from .files import sha256_file
from .schedule import as_windows
from .seeds import derive_seed, generator


@dataclass(frozen=True)
class PromptGroup:
    """One prompt's group of rollouts in one iteration.

    Attributes:
        prompt: text.
        group_id: SHA-256 (hex) of prompt and start image, a dash, and how often the same prompt
            occurred before in this iteration.
        sde_step: index of the one stochastic step all samples share.
        noise_seeds: seed of the initial noise per sample; all equal when the noise is shared.
        sde_seeds: seed of the SDE noise per sample.
        start_image: path of the start image for image-to-video, or None.
        sample_steps: the stochastic steps of each sample, for strategies other than Flash-GRPO;
            empty is `sde_step` for all.
        importance: importance weight of the group's loss, when its step was not drawn evenly.
    """

    prompt: str
    group_id: str
    sde_step: int
    noise_seeds: tuple[int, ...]
    sde_seeds: tuple[int, ...]
    start_image: str | None = None
    sample_steps: tuple[tuple[int, ...], ...] = ()
    importance: float = 1.0

    def steps_of(self, sample: int) -> tuple[int, ...]:
        """The stochastic steps of a sample, ascending."""
        return self.sample_steps[sample] if self.sample_steps else (self.sde_step,)

    @property
    def same_steps(self) -> bool:
        """Whether all samples are stochastic at the same steps (iso-temporal)."""
        return len(set(self.sample_steps)) <= 1

    def at(self, step: int) -> PromptGroup:
        """The group as it looks at one of its stochastic steps."""
        return self if step == self.sde_step else replace(self, sde_step=step)

    @property
    def size(self) -> int:
        """Number of samples G."""
        return len(self.sde_seeds)

    @property
    def shared_noise(self) -> bool:
        """Whether all samples start from the same noise."""
        return len(set(self.noise_seeds)) == 1


def prompt_key(prompt: str, start_image: str | None = None) -> str:
    """SHA-256 (hex) that identifies a prompt with its start image, by what is in the image."""
    text = prompt if start_image is None else f"{prompt}\0{_content(start_image)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _content(path: str) -> str:
    """Hash of a file, the path itself when there is no such file (its reader will say so)."""
    try:
        stat = os.stat(path)
        return _hash_of(path, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return path


@lru_cache(maxsize=4096)
def _hash_of(path: str, mtime: int, size: int) -> str:
    return sha256_file(Path(path))


def choose_prompts(count: int, total: int, iteration: int, run_seed: int) -> list[int]:
    """Indices of the prompts of one iteration: epochs of seeded permutations, read in order.

    Args:
        count: prompts per iteration P.
        total: number of training prompts.
        iteration: 1-based iteration.
        run_seed: seed of the run.
    """
    first = (iteration - 1) * count
    chosen = []
    for position in range(first, first + count):
        epoch, offset = divmod(position, total)
        order = torch.randperm(total, generator=generator(run_seed, epoch, "prompt order"))
        chosen.append(int(order[offset]))
    return chosen


def draw_steps(
    count: int,
    window: tuple[int, int],
    draw: str,
    iteration: int,
    run_seed: int,
    purpose: str = "sde step",
) -> list[int]:
    """One SDE step per group, at least two distinct ones.

    Args:
        count: number of groups P, at least 2.
        window: half-open range of eligible steps, at least 2 wide.
        draw: `stratified` concatenates random permutations of the window; `uniform` draws with
            replacement (the paper) and redraws in the rare case that all agree.
        iteration: iteration the draw is for.
        run_seed: seed of the run.
        purpose: what the draw is for; experts draw independently.

    Raises:
        FlashGRPOError: fewer than two groups or eligible steps.
    """
    first, end = window
    pool = end - first
    if count < 2 or pool < 2:
        raise FlashGRPOError(
            f"{count} prompt(s) and {pool} eligible SDE step(s): an update over a single noise level "
            "collapses, use at least 2 prompts per iteration and a window of at least 2 steps"
        )
    rng = generator(run_seed, iteration, purpose)
    if draw == "stratified":
        drawn = torch.cat([torch.randperm(pool, generator=rng) for _ in range(-(-count // pool))])[
            :count
        ]
    elif draw == "uniform":
        drawn = torch.randint(pool, (count,), generator=rng)
        while bool((drawn == drawn[0]).all()):
            drawn = torch.randint(pool, (count,), generator=rng)
    else:
        raise FlashGRPOError(f"step draw {draw!r} is unknown: choose stratified or uniform")
    return [first + int(k) for k in drawn]


def draw_expert_steps(
    count: int, windows: Sequence[tuple[int, int]], draw: str, iteration: int, run_seed: int
) -> list[int]:
    """One SDE step per group, the groups dealt to the windows of the experts in turn.

    With an odd count the spare group goes to another expert in each iteration.

    Raises:
        FlashGRPOError: an expert gets fewer than two groups or has fewer than two steps.
    """
    if len(windows) == 1:
        return draw_steps(count, windows[0], draw, iteration, run_seed)
    if count < 2 * len(windows):
        raise FlashGRPOError(
            f"{count} prompts per iteration for {len(windows)} experts: use at least "
            f"{2 * len(windows)}, so that each expert sees two noise levels"
        )
    steps = [0] * count
    for w, window in enumerate(windows):
        rows = expert_rows(count, w, len(windows), iteration)
        drawn = draw_steps(len(rows), window, draw, iteration, run_seed, f"sde step {w}")
        for row, step in zip(rows, drawn, strict=True):
            steps[row] = step
    return steps


def expert_rows(count: int, expert: int, experts: int, iteration: int) -> list[int]:
    """Which of an iteration's groups belong to an expert: they are dealt in turn."""
    return [row for row in range(count) if (row + iteration) % experts == expert]


def make_groups(
    prompts: Sequence[str],
    *,
    iteration: int,
    run_seed: int,
    group_size: int,
    window: tuple[int, int] | Sequence[tuple[int, int]],
    draw: str = "stratified",
    noise: str = "shared",
    start_images: Sequence[str | None] | None = None,
) -> list[PromptGroup]:
    """Iso-temporal groups for the prompts of one iteration.

    Args:
        prompts: the iteration's prompts, P of them; repeats are told apart by their occurrence.
        iteration: 1-based iteration.
        run_seed: seed of the run; with iteration, group id and sample index it decides all noise.
        group_size: samples per prompt G, at least 2.
        window: half-open range of eligible steps; several are those of the trained experts.
        draw: `stratified` or `uniform`.
        noise: `shared` (one initial noise per group) or `independent` (one per sample).
        start_images: per prompt, for image-to-video.

    Raises:
        FlashGRPOError: group size below 2, or see `draw_steps`.
    """
    if group_size < 2:
        raise FlashGRPOError(
            f"group size {group_size} is below 2: advantages compare videos of one prompt, use 8"
        )
    if noise not in ("shared", "independent"):
        raise FlashGRPOError(f"noise {noise!r} is unknown: choose shared or independent")
    steps = draw_expert_steps(len(prompts), as_windows(window), draw, iteration, run_seed)
    images = start_images or [None] * len(prompts)
    seen: Counter[str] = Counter()
    groups = []
    for prompt, image, step in zip(prompts, images, steps, strict=True):
        key = prompt_key(prompt, image)
        group_id = f"{key}-{seen[key]}"
        seen[key] += 1

        def seed(sample: int, purpose: str, group_id: str = group_id) -> int:
            return derive_seed(run_seed, iteration, group_id, sample, purpose)

        noise_seeds = tuple(
            seed(0 if noise == "shared" else i, "initial noise") for i in range(group_size)
        )
        sde_seeds = tuple(seed(i, "sde noise") for i in range(group_size))
        groups.append(PromptGroup(prompt, group_id, step, noise_seeds, sde_seeds, image))
    return groups
