"""LoRAs that a run starts from: continued ones are the reference, frozen ones belong to the base."""

from __future__ import annotations

import pytest
import torch

from flashgrpo_core.build import load_networks
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.export import write_lora
from flashgrpo_core.seeds import normal


@pytest.fixture
def trained(small_config, tmp_path):
    """A policy with a LoRA that does something, and its file."""
    config = small_config()
    networks = load_networks(config)
    weights = networks.policy.snapshot()
    for index, name in enumerate(sorted(weights)):
        if name.endswith("lora_B"):
            weights[name] = 0.1 * normal(tuple(weights[name].shape), index)
    path = tmp_path / "start.safetensors"
    write_lora(path, networks.policy, weights, config, 7, networks.spec)
    latents, context = normal((1, 16, 3, 8, 8), 1), normal((32, 4096), 2)
    with torch.no_grad():
        base = networks.policy.velocity(latents, 500.0, context)
        with networks.policy.using(weights):
            velocity = networks.policy.velocity(latents, 500.0, context)
    assert (velocity - base).abs().max() > 1e-2 * base.abs().max()
    return path, latents, context, base, velocity


def test_a_continued_lora_is_where_training_and_reference_start(small_config, trained):
    path, latents, context, _, velocity = trained
    policy = load_networks(small_config(model={"continue_from": str(path)})).policy
    with torch.no_grad():
        assert torch.allclose(policy.velocity(latents, 500.0, context), velocity, atol=1e-6)
        for parameter in policy.parameters().values():
            parameter.mul_(0.5)
        with policy.reference():
            assert torch.allclose(policy.velocity(latents, 500.0, context), velocity, atol=1e-6)


def test_a_frozen_lora_stays_on_in_the_reference(small_config, trained):
    path, latents, context, base, velocity = trained
    frozen = [{"file": str(path), "strength": 1.0}]
    policy = load_networks(small_config(model={"frozen_loras": frozen})).policy
    with torch.no_grad():
        got = policy.velocity(latents, 500.0, context)
        error = (got - velocity).abs().max()
        assert error <= 1e-3 * (velocity - base).abs().max()
        with policy.reference():
            assert torch.equal(policy.velocity(latents, 500.0, context), got)


def test_another_rank_is_refused_with_the_fix(small_config, trained):
    with pytest.raises(FlashGRPOError, match="set model.lora_rank = 16"):
        load_networks(small_config(model={"continue_from": str(trained[0]), "lora_rank": 8}))
