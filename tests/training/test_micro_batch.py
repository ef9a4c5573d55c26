"""Another micro-batch size is the same iteration up to floating-point order.

Locks in: every draw is seeded by what it is for, so the noise is the same bit for bit; rollouts
agree to 1e-4 and the gradient to 1e-5 of its norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flashgrpo_core.networks import Networks, load_networks
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.trainer import Trainer
from flashgrpo_core.update import policy_gradient, update_units


@pytest.fixture(scope="module")
def networks() -> list[Networks]:
    return []


def iteration(
    config: Any, networks: Networks, advantages: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First iteration: initial noise, finished latents (by group and sample), LoRA gradient."""
    torch.set_num_threads(1)
    folder = RunFolder(config.run.output, config.run.name)
    folder.create(config)
    trainer = Trainer(config, networks, folder)
    groups = trainer.group(1)
    rollouts = trainer.rollout(groups, 1)
    noise = torch.cat([trainer.sampler.start(r.group, r.samples, 0) for r in rollouts])
    finals = torch.cat([r.final for r in rollouts])
    used = np.ones(advantages.shape, bool)
    units = update_units(trainer.sampler, groups, rollouts, used, trainer.world)
    gradient, stats = policy_gradient(
        trainer.policy,
        trainer.sampler,
        groups,
        units,
        advantages,
        used,
        config.loss,
        list(trainer.windows.values()),
    )
    assert stats.ratio_drift == 0.0  # at equal micro-batch in rollout and update
    return noise, finals, torch.cat([g.flatten() for g in gradient.values()])


@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_another_micro_batch_is_the_same_iteration(
    small_config: Any, networks: list[Networks], noise: str
) -> None:
    advantages = np.random.default_rng(4).standard_normal((2, 4))
    found = []
    for size in (4, 3, 1):
        config = small_config(
            f"{noise}{size}",
            rollout={"noise": noise, "group_size": 4, "micro_batch": size},
            model={"device": "cpu"},
        )
        if not networks:
            networks.append(load_networks(config))
        found.append(iteration(config, networks[0], advantages))
    (first_noise, first_finals, first_gradient), *others = found
    assert float(first_gradient.norm()) > 0
    for start, finals, gradient in others:
        # With one noise per group there is one start per micro-batch.
        assert torch.equal(start.unique(dim=0), first_noise.unique(dim=0))
        assert float((finals - first_finals).abs().max()) <= 1e-4
        error = float((gradient - first_gradient).norm() / first_gradient.norm())
        assert error <= 1e-5
