"""How many transformer forwards a rollout takes: closed formulas, which tests hold against counts.

Everything is per video: a forward of a batch of B counts B, both halves of guidance count 2, and a
forward that step caching cuts short counts in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from .groups import PromptGroup
from .policy import WanPolicy, forwards_per_velocity
from .rollout import RolloutSettings
from .schedule import Schedule
from .solver import suffix_sigmas, suffix_steps


def share_cost(
    groups: Sequence[PromptGroup], steps: int, settings: RolloutSettings
) -> Callable[[tuple[int, range], tuple[int, range] | None], int]:
    """Velocities (per video) that a share of `sample_shares` takes after the one before it."""

    def cost(share: tuple[int, range], before: tuple[int, range] | None) -> int:
        group, samples = groups[share[0]], len(share[1])
        if not settings.shares(group):
            return samples * steps
        prefix = group.sde_step + 1
        known = before is not None and before[0] == share[0]
        suffix = suffix_steps(steps - prefix, settings.suffix_share)
        return samples * suffix + (0 if known else prefix)

    return cost


def rollout_forwards(
    groups: Sequence[PromptGroup],
    schedule: Schedule,
    settings: RolloutSettings,
    stages: Sequence[tuple[WanPolicy, range]] | None = None,
) -> int:
    """Transformer forwards that sampling these groups takes.

    Args:
        groups: what is sampled.
        schedule: noise levels.
        settings: sizes and guidance.
        stages: which network computes which steps; None is one network.
    """
    guidance = [settings.guidance] * schedule.steps
    for expert, own in stages or ():
        for step in own:
            guidance[step] = settings.guidance_of(expert)
    last = stages[-1][1].start if stages else 0
    return sum(
        group_forwards(schedule, settings, guidance, steps, samples, settings.shares(g), last)
        for g in groups
        for steps, samples in Counter(g.steps_of(i) for i in range(g.size)).items()
    )


def group_forwards(
    schedule: Schedule,
    settings: RolloutSettings,
    guidance: Sequence[float],
    sde_steps: tuple[int, ...],
    size: int,
    shared: bool,
    last: int = 0,
) -> int:
    """Transformer forwards that sampling the samples of a group takes.

    Args:
        schedule: noise levels.
        settings: guidance interval and suffix share.
        guidance: guidance scale of each step's network.
        sde_steps: the stochastic steps of the samples, ascending; empty for plain ODE sampling.
        size: how many samples.
        shared: whether everything up to the first SDE step's velocity is computed once.
        last: first step of the last expert; only its part of the suffix is shortened.
    """
    cost = velocity_forwards(schedule, settings, guidance)
    prefix = sde_steps[0] + 1 if shared else 0
    suffix = max(sde_steps[-1] + 1, last) if sde_steps else max(1, last)
    finish = sum(
        forwards_per_velocity(settings.guidance_at(guidance[-1], float(sigma)))
        for sigma in suffix_sigmas(schedule.sigmas, suffix, settings.suffix_share)[:-1]
    )
    return sum(cost[:prefix]) + size * (sum(cost[prefix:suffix]) + finish)


def velocity_forwards(
    schedule: Schedule, settings: RolloutSettings, guidance: Sequence[float]
) -> list[int]:
    """Transformer forwards of one rollout velocity at each step of the schedule."""
    return [
        forwards_per_velocity(settings.guidance_at(scale, float(sigma)))
        for scale, sigma in zip(guidance, schedule.sigmas[:-1], strict=True)
    ]
