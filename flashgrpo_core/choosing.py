"""What an iteration trains on: its prompts, and the SDE step of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .config import Config
from .groups import PromptGroup, choose_prompts, expert_rows, make_groups, prompt_key
from .prompts import Prompt, PromptSplit
from .schedule import Window
from .seeds import generator
from .signals import StepSignals, draw_by, step_probabilities
from .strategies import stochastic_steps, without_noise
from .windows import sde_windows

#: Probability that a prompt whose last group was saturated is taken when its turn comes.
COME_BACK = 0.25


def iteration_groups(
    config: Config,
    prompts: PromptSplit,
    iteration: int,
    *,
    chosen: Sequence[Prompt] | None = None,
    signals: StepSignals | None = None,
) -> list[PromptGroup]:
    """The groups of one iteration: its prompts, each with its SDE step and seeds.

    Args:
        config: the configuration.
        prompts: the prompts; those to train on are used.
        iteration: 1-based iteration.
        chosen: the iteration's prompts; None reads them in order of seeded permutations.
        signals: what past iterations have measured, for `schedule.adaptive`; None draws as
            `schedule.draw` says.
    """
    count, seed = config.rollout.prompts_per_iteration, config.run.seed
    if chosen is None:
        order = choose_prompts(count, len(prompts.train), iteration, seed)
        chosen = [prompts.train[i] for i in order]
    windows = list(sde_windows(config).values())
    groups = make_groups(
        [p.text for p in chosen],
        iteration=iteration,
        run_seed=seed,
        group_size=config.rollout.group_size,
        window=windows,
        draw=config.schedule.draw,
        noise=config.rollout.noise,
        start_images=[p.image for p in chosen],
    )
    if config.loss.algorithm == "nft":
        return without_noise(groups)
    if signals is not None:
        return adapt_steps(
            groups, windows, signals, config.schedule.adaptive_floor, iteration, seed
        )
    return stochastic_steps(
        groups,
        config.schedule.strategy,
        windows[0],
        train_steps=config.schedule.train_steps,
        place=config.schedule.place,
        every=config.schedule.place_every,
        iteration=iteration,
        run_seed=seed,
    )


def adapt_steps(
    groups: Sequence[PromptGroup],
    windows: Sequence[Window],
    signals: StepSignals,
    floor: float,
    iteration: int,
    run_seed: int,
) -> list[PromptGroup]:
    """Groups with steps drawn in proportion to the measured signal, and importance weights.

    Args:
        groups: as `make_groups` makes them.
        windows: eligible steps, per trained expert.
        signals: measurements of past iterations.
        floor: see `signals.step_probabilities`.
        iteration: 1-based iteration.
        run_seed: seed of the run.
    """
    found = list(groups)
    for w, window in enumerate(windows):
        rows = expert_rows(len(groups), w, len(windows), iteration)
        seed = generator(run_seed, iteration, f"adaptive step {w}")
        probabilities = step_probabilities(signals.ratios(window), floor)
        drawn, weights = draw_by(probabilities, len(rows), seed)
        for row, i, weight in zip(rows, drawn, weights, strict=True):
            found[row] = replace(groups[row], sde_step=window[0] + i, importance=weight)
    return found


def unsaturated_prompts(
    prompts: Sequence[Prompt], count: int, position: int, saturated: set[str], run_seed: int
) -> tuple[list[Prompt], int]:
    """The next prompts in the order of seeded permutations, most saturated ones passed over.

    A prompt is saturated when the videos of its last group all had the same reward: such a group
    costs as much as another and teaches nothing. One in four of their turns they are taken all the
    same, to see whether that has changed. The gradient is then that of the prompts that still
    differ, not of all prompts alike: a bias towards what is not solved yet, and meant as such.

    Args:
        prompts: those to train on.
        count: prompts per iteration.
        position: where in the endless order to begin.
        saturated: keys (`groups.prompt_key`) of saturated prompts.
        run_seed: seed of the run.

    Returns:
        The prompts and where the next iteration begins.
    """
    keys = [prompt_key(p.text, p.image) for p in prompts]
    chosen: list[Prompt] = []
    patience = position + 2 * len(prompts) + count  # when nearly all are saturated, take them
    while len(chosen) < count:
        epoch, offset = divmod(position, len(prompts))
        order = torch.randperm(len(prompts), generator=generator(run_seed, epoch, "prompt order"))
        i = int(order[offset])
        luck = torch.rand(1, generator=generator(run_seed, position, "come back"))
        if keys[i] not in saturated or position >= patience or float(luck) < COME_BACK:
            chosen.append(prompts[i])
        position += 1
    return chosen, position
