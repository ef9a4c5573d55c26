"""`preset = paper` on 20 steps at shift 3: the reference's weights, and its loss in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from flashgrpo_core.build import build_schedule, rollout_settings
from flashgrpo_core.choosing import iteration_groups
from flashgrpo_core.config_io import build_config
from flashgrpo_core.distributed import World
from flashgrpo_core.loss import window_weights
from flashgrpo_core.prompts import Prompt, PromptSplit
from flashgrpo_core.update import policy_gradient, update_units
from flashgrpo_core.windows import sde_windows
from tests.unit._tiny import (  # noqa: F401
    PROMPTS,
    one_thread,
    perturb,
    sample_all,
    tiny_policy,
    tiny_sampler,
)

VECTORS = json.loads(
    (Path(__file__).parents[1] / "data" / "reference_vectors.json").read_text(encoding="utf-8")
)
CONFIG = build_config(
    {"model": {"transformer": "wan2.1_t2v_1.3B_bf16.safetensors"}, "run": {"preset": "paper"}}
)


def test_the_preset_is_the_paper_s_setting() -> None:
    s, r, loss = CONFIG.schedule, CONFIG.rollout, CONFIG.loss
    assert (s.kind, s.steps, s.shift, s.sde, s.eta, s.draw) == (
        "unipc-a", 20, 3.0, "flash", 1.0, "uniform",
    )  # fmt: skip
    assert (r.noise, r.shared_prefix, r.guidance, r.group_size) == ("independent", False, 4.5, 8)
    assert (r.width, r.height, r.frames, r.prompts_per_iteration) == (832, 480, 81, 24)
    assert (loss.rectification, loss.clip, loss.kl, loss.advantage_std) == (
        "update", 1e-3, 0.0, "raw_update",
    )  # fmt: skip
    assert (loss.algorithm, loss.ratio, loss.mask) == ("grpo", "plain", "clip")
    assert list(sde_windows(CONFIG).values()) == [(0, 10)]
    assert rollout_settings(CONFIG).latent_shape == (16, 21, 60, 104)


def test_its_weights_are_the_reference_s() -> None:
    """1/lambda of the recorded transitions of the reference, divided by the update's mean."""
    schedule = build_schedule(CONFIG)
    cases = [c for c in VECTORS["cases"] if (c["steps"], c["shift"], c["grid"]) == (20, 3.0, "A")]
    steps = [c["step"] for c in cases]
    assert len(steps) >= 3 and max(steps) < 10
    counts = list(range(1, len(steps) + 1))
    inverse = np.array([c["inverse_lambda"] for c in cases])
    got = window_weights(
        steps,
        schedule,
        list(sde_windows(CONFIG).values()),
        kind=CONFIG.schedule.sde,
        eta=CONFIG.schedule.eta,
        normaliser=CONFIG.loss.rectification,
        counts=counts,
    )
    np.testing.assert_allclose(got, inverse / np.average(inverse, weights=counts), rtol=1e-5)


def test_its_loss_on_a_recorded_batch() -> None:
    """Off policy, with clamped advantages and clipped ratios: everything again in float64."""
    policy = tiny_policy(moved=0.1)
    schedule = build_schedule(CONFIG)
    sampler = tiny_sampler(policy, schedule, guidance=4.5, shared_prefix=False)
    split = PromptSplit([Prompt(p) for p in PROMPTS], [], [])
    config = build_config(
        {
            "model": {"transformer": "wan2.1_t2v_1.3B_bf16.safetensors"},
            "rollout": {"prompts_per_iteration": 3, "group_size": 4},
            "run": {"preset": "paper", "seed": 2},
        }
    )
    groups = iteration_groups(config, split, 1)
    rollouts = sample_all(sampler, groups)
    advantages = np.clip(3 * np.random.default_rng(0).normal(size=(3, 4)), -5, 5)
    used = np.ones((3, 4), bool)
    used[2, 1] = False
    perturb(policy, 0.01, seed=4)
    units = update_units(sampler, groups, rollouts, used, World())
    _, stats = policy_gradient(
        policy, sampler, groups, units, advantages, used, config.loss, (0, 10)
    )
    sampler.forget()
    sigmas = schedule.sigmas
    inverse, terms, cut = [], [], 0
    for rollout in rollouts:
        row, k = groups.index(rollout.group), rollout.group.sde_step
        sigma, dt = sigmas[k], sigmas[k + 1] - sigmas[k]
        std = sigmas[1] * sigma
        s = std * math.sqrt(-dt)
        scale = math.sqrt(-dt) / std + std * math.sqrt(-dt) * (1 - sigma) / (2 * sigma)
        with torch.no_grad():
            velocity = sampler.velocity(rollout.group, rollout.latents).double()
        x, action = rollout.latents.double(), rollout.latents_next.double()
        drift = std**2 / (2 * sigma)
        mean = x * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt
        density = -((action - mean) ** 2) / (2 * s**2) - math.log(s) - 0.5 * math.log(2 * math.pi)
        new = density.flatten(1).mean(1).numpy()
        for i, sample in enumerate(rollout.samples):
            if not used[row, sample]:
                continue
            a = advantages[row, sample]
            ratio = math.exp(new[i] - float(rollout.old_log_prob[i]))
            clipped = min(max(ratio, 1 - 1e-3), 1 + 1e-3)
            cut += (a > 0 and ratio > clipped) or (a < 0 and ratio < clipped)
            inverse.append(1 / scale)
            terms.append(max(-a * ratio, -a * clipped))
    weights = np.array(inverse) / np.mean(inverse)
    assert len(terms) == 11 and len(set(inverse)) > 1 and 0 < cut < 11
    assert stats.clip_fraction == pytest.approx(cut / 11)
    assert stats.loss == pytest.approx(float(np.mean(weights * terms)), abs=1e-5)
    assert stats.ratio_drift > 1e-3
