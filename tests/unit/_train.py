"""Pieces of the tests of the train step: one update, gradient norms, a rank of several."""

from __future__ import annotations

import math

import numpy as np
import torch

from flashgrpo_core.config import LossConfig
from flashgrpo_core.distributed import World
from flashgrpo_core.groups import PromptGroup
from flashgrpo_core.rollout import Rollout, RolloutSampler
from flashgrpo_core.update import GradientStats, policy_gradient, update_units
from tests.unit._tiny import SHAPE

WINDOW = (0, 3)
ELEMENTS = math.prod(SHAPE)
Gradient = dict[str, torch.Tensor]


def advantages_for(groups: list[PromptGroup], seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(len(groups), groups[0].size))
    return values - values.mean(1, keepdims=True)


def update(
    sampler: RolloutSampler,
    groups: list[PromptGroup],
    rollouts: list[Rollout],
    advantages: np.ndarray | None = None,
    used: np.ndarray | None = None,
    *,
    world: World | None = None,
    window: tuple[int, int] = WINDOW,
    **loss: object,
) -> tuple[Gradient, GradientStats]:
    world = world or World()
    advantages = advantages_for(groups) if advantages is None else advantages
    used = np.ones(advantages.shape, bool) if used is None else used
    units = update_units(sampler, groups, rollouts, used, world)
    return policy_gradient(
        sampler.policy,
        sampler,
        groups,
        units,
        advantages,
        used,
        LossConfig(**loss),
        window,
        world=world,
    )


def norm(gradient: Gradient) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))


def relative_difference(a: Gradient, b: Gradient) -> float:
    """Norm of the difference over the norm: single elements are far too small to compare."""
    assert a.keys() == b.keys()
    return norm({n: a[n].double() - b[n].double() for n in a}) / norm(b)


class Part(World):
    """One of several ranks whose sums stay partial, so that a test can add them up itself."""

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        return array
