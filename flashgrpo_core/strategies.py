"""Which steps of a rollout are stochastic and trained: Flash-GRPO and what it is compared with.

Nothing else differs between strategies: the same sampler, advantages, loss and optimizer.

- `flash`: one step a group, shared by its samples (Flash-GRPO, arXiv 2605.15980).
- `full`: every step of the window (Flow-GRPO, arXiv 2505.05470).
- `window`: `schedule.train_steps` neighbouring steps of the window: at its start, at a random place
  per group, or moving along it as training goes on (Flow-GRPO-Fast; MixGRPO, arXiv 2507.21802).
- `mixed`: one step, but each sample draws its own. The rewards of a group then differ by how hard
  the steps were too: what iso-temporal grouping avoids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .errors import FlashGRPOError
from .groups import PromptGroup
from .schedule import Window
from .seeds import derive_seed, generator

STRATEGIES = ("flash", "full", "window", "mixed")
PLACES = ("start", "random", "progressive")


def stochastic_steps(
    groups: Sequence[PromptGroup],
    strategy: str,
    window: Window,
    *,
    train_steps: int = 2,
    place: str = "random",
    every: int = 10,
    iteration: int = 1,
    run_seed: int = 0,
) -> list[PromptGroup]:
    """Groups whose samples are stochastic where the strategy says.

    Args:
        groups: as `make_groups` makes them.
        strategy: see `STRATEGIES`.
        window: half-open range of eligible steps.
        train_steps: number of steps of `window`.
        place: where in the window they lie, see `PLACES`.
        every: iterations after which a progressive window moves on by one step.
        iteration: 1-based iteration.
        run_seed: seed of the run.

    Raises:
        FlashGRPOError: an unknown strategy or place, or more steps than the window has.
    """
    first, end = window
    if strategy not in STRATEGIES:
        raise FlashGRPOError(
            f"schedule.strategy {strategy!r} is unknown: choose one of {', '.join(STRATEGIES)}"
        )
    if strategy == "flash":
        return list(groups)
    if strategy == "window" and place not in PLACES:
        raise FlashGRPOError(
            f"schedule.place {place!r} is unknown: choose one of {', '.join(PLACES)}"
        )
    if strategy == "window" and not 1 <= train_steps <= end - first:
        raise FlashGRPOError(
            f"schedule.train_steps = {train_steps} does not fit the window [{first}, {end}): use "
            f"1 to {end - first}"
        )
    found = []
    for group in groups:
        steps: tuple[tuple[int, ...], ...]
        if strategy == "mixed":
            # In order, so that samples with the same step can share a micro-batch: samples of a group
            # are exchangeable.
            own = sorted(first + _draw(end - first, seed, "own step") for seed in group.sde_seeds)
            steps = tuple((step,) for step in own)
        elif strategy == "full":
            steps = (tuple(range(first, end)),) * group.size
        else:
            places = end - first - train_steps + 1
            offset = {
                "start": 0,
                "random": _draw(places, run_seed, iteration, group.group_id, "window"),
                "progressive": min((iteration - 1) // every, places - 1),
            }[place]
            start = first + offset
            steps = (tuple(range(start, start + train_steps)),) * group.size
        found.append(replace(group, sde_step=steps[0][0], sample_steps=steps))
    return found


def without_noise(groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    """Groups whose samples have no stochastic step: they differ by their initial noise alone."""
    return [replace(group, sde_step=0, sample_steps=((),) * group.size) for group in groups]


def possible_steps(
    strategy: str, window: Window, train_steps: int, place: str
) -> list[tuple[int, ...]]:
    """The sets of steps a sample may be stochastic at, equally likely over a run."""
    first, end = window
    if strategy == "full":
        return [tuple(range(first, end))]
    if strategy == "window":
        starts = [first] if place == "start" else range(first, end - train_steps + 1)
        return [tuple(range(start, start + train_steps)) for start in starts]
    return [(step,) for step in range(first, end)]


def _draw(count: int, *words: int | str) -> int:
    return int(torch.randint(count, (1,), generator=generator(*words)))


def step_seed(group: PromptGroup, sample: int, step: int) -> int:
    """Seed of a sample's noise at one of its stochastic steps; its own seed at the first."""
    seed = group.sde_seeds[sample]
    return seed if step == group.steps_of(sample)[0] else derive_seed(seed, step, "sde noise")


def trained_transitions(group: PromptGroup, used: Sequence[bool]) -> dict[int, int]:
    """Step -> number of used samples that are stochastic there."""
    counts: dict[int, int] = {}
    for sample, use in enumerate(used):
        for step in group.steps_of(sample):
            counts[step] = counts.get(step, 0) + int(use)
    return counts
