"""Two experts: where they change, who gets which noise levels, and the policy made of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashgrpo_core.conditioning import StartImage, known_velocity, model_inputs
from flashgrpo_core.config_io import build_config
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.experts import HIGH, LOW, TwoExperts, expert_names, switch_step
from flashgrpo_core.forwards import rollout_forwards
from flashgrpo_core.groups import draw_expert_steps
from flashgrpo_core.loss import rectification_weights, window_weights
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.rollout import RolloutSampler, RolloutSettings
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.windows import sde_windows
from tests.unit._tiny import SHAPE, embedding, perturb, tiny_groups, tiny_transformer


def two(boundary: float = 0.8, **options: bool) -> TwoExperts:
    """Two random experts whose LoRAs do something."""
    experts = [
        WanPolicy(tiny_transformer(seed), rank=4, alpha=8.0, seed=seed, name=name, trained=trained)
        for seed, (name, trained) in enumerate(
            ((HIGH, options.get("high", True)), (LOW, options.get("low", True)))
        )
    ]
    for expert in experts:
        if expert.trained:
            perturb(expert, 0.02, 1)
    return TwoExperts(*experts, boundary)


# ------------------------------------------------------------------------------------- the switch


@pytest.mark.parametrize("kind", ["simple", "unipc-a", "unipc-b"])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0, 12.0])
@pytest.mark.parametrize("boundary", [0.875, 0.9])
def test_the_switch_is_the_first_sigma_below_the_boundary(kind, shift, boundary) -> None:
    for steps in (4, 8, 20, 30, 50):
        schedule = make_schedule(kind, steps, shift)
        switch = switch_step(schedule, boundary)
        sigmas = torch.tensor(schedule.sigmas, dtype=torch.float32)
        assert bool((sigmas[:switch] >= boundary).all())
        assert bool(sigmas[switch] < boundary)
        # diffusers compares whole timesteps; the published boundaries are whole ones.
        if kind != "simple":
            assert switch == int((schedule.timesteps >= 1000 * boundary).sum())


def test_a_sigma_on_the_boundary_belongs_to_the_high_noise_expert() -> None:
    # shift 3, 4 steps: 1, 0.9, 0.75, 0.5; float32(0.9) is less than the double 0.9.
    schedule = make_schedule("simple", 4, 3.0)
    assert float(schedule.sigmas.astype(np.float32)[1]) < 0.9
    assert switch_step(schedule, 0.9) == 2
    # shift 7: sigma 0.875 exactly at half of the grid.
    assert switch_step(make_schedule("simple", 4, 7.0), 0.875) == 3


# ------------------------------------------------------------------------------------- the windows


def configured(**tables):
    model = {"transformer": "high", "transformer_low": "low", "boundary": 0.875}
    merged = {"model": model, "schedule": {"steps": 20, "shift": 5.0}}
    for table, values in tables.items():
        merged.setdefault(table, {}).update(values)
    return build_config(merged)


def test_windows_follow_from_the_boundary() -> None:
    # shift 5, 20 steps: step 8 has sigma 0.882, step 9 has 0.859.
    assert sde_windows(configured()) == {HIGH: (0, 9), LOW: (9, 14)}
    assert sde_windows(configured(model={"boundary": 0.9})) == {HIGH: (0, 8), LOW: (8, 14)}
    assert sde_windows(configured(schedule={"window": [2, 12]})) == {HIGH: (2, 9), LOW: (9, 12)}
    assert sde_windows(configured(model={"train_experts": "low_noise"})) == {LOW: (9, 14)}
    assert sde_windows(build_config({"model": {"transformer": "x"}})) == {"": (0, 10)}


def test_an_expert_without_two_steps_is_refused() -> None:
    four = {"steps": 4, "shift": 5.0}
    with pytest.raises(FlashGRPOError, match=r"low_noise expert has 1 .* change at step 2 of 4"):
        sde_windows(configured(schedule=four))
    assert sde_windows(configured(schedule=four, model={"train_experts": HIGH})) == {HIGH: (0, 2)}
    with pytest.raises(FlashGRPOError, match=r"low_noise expert has 0"):
        sde_windows(configured(schedule={"window": [0, 9]}))


def test_settings_of_experts_need_experts() -> None:
    for key, value in (("train_experts", LOW), ("boundary", 0.9), ("continue_from_low", "a")):
        with pytest.raises(FlashGRPOError, match=rf"model\.{key}.*transformer_low"):
            build_config({"model": {"transformer": "x", key: value}})
    with pytest.raises(FlashGRPOError, match="is for the low_noise expert"):
        frozen = [{"file": "a", "expert": LOW}]
        build_config({"model": {"transformer": "x", "frozen_loras": frozen}})


def test_groups_are_dealt_to_the_experts() -> None:
    windows = [(0, 9), (9, 14)]
    for iteration in (1, 2):
        steps = draw_expert_steps(7, windows, "stratified", iteration, 3)
        low = sum(step >= 9 for step in steps)
        assert low == (4 if iteration % 2 else 3)  # the spare one alternates
        assert len({s for s in steps if s < 9}) == 7 - low
    with pytest.raises(FlashGRPOError, match="3 prompts per iteration for 2 experts"):
        draw_expert_steps(3, windows, "uniform", 1, 3)


def test_weights_are_normalised_per_expert() -> None:
    schedule, windows = make_schedule("simple", 20, 5.0), [(0, 9), (9, 14)]
    steps = [1, 10, 5, 13]
    got = window_weights(steps, schedule, windows)
    assert got[[0, 2]].tolist() == rectification_weights([1, 5], schedule, (0, 9)).tolist()
    assert got[[1, 3]].tolist() == rectification_weights([10, 13], schedule, (9, 14)).tolist()
    with pytest.raises(FlashGRPOError, match="SDE step 15 is in no window"):
        window_weights([1, 15], schedule, windows)


# ------------------------------------------------------------------------------------- the policy


def test_tensors_carry_their_expert() -> None:
    policy = two()
    weights = policy.snapshot()
    assert expert_names(weights) == [HIGH, LOW] and weights.keys() == policy.parameters().keys()
    assert len(weights) == 2 * len(policy.experts[HIGH].parameters())
    policy.initialise(0)
    assert not all(torch.equal(a, weights[n]) for n, a in policy.snapshot().items())
    policy.load(weights)
    assert all(torch.equal(a, weights[n]) for n, a in policy.snapshot().items())
    only = two(low=False)
    assert expert_names(only.snapshot()) == [HIGH]
    with pytest.raises(FlashGRPOError, match="belongs to no trained expert"):
        only.load(weights)


@torch.no_grad()
def test_sampling_is_each_expert_on_its_own_steps() -> None:
    """Against a plain loop that picks the expert by sigma, with a guidance for each."""
    policy, schedule = two(), make_schedule("simple", 6, 3.0)
    settings = RolloutSettings(SHAPE, guidance=2.0, guidance_low=1.5)
    negative = embedding("negative")
    sampler = RolloutSampler(policy, schedule, settings, embedding, negative)
    group = tiny_groups(2, size=2)[0]
    for sde_step in (1, 4):  # one in each expert; sigmas 1, .938, .857, .75, .6, .375
        group = type(group)(**{**vars(group), "sde_step": sde_step})
        sampler.forget()
        rollout = sampler.sample(group, range(2))
        x = rollout.latents
        expected = _loop(policy, schedule, negative, group, range(sde_step))
        assert torch.allclose(x, expected, atol=1e-5)
        after = _loop(
            policy, schedule, negative, group, range(sde_step + 1, 6), rollout.latents_next
        )
        assert torch.allclose(rollout.final, after, atol=1e-5)
        # A process that did not roll it out redraws the same bits.
        sampler.forget()
        again = sampler.transition_of(group)
        assert torch.equal(again.latents_next, rollout.latents_next)
        assert torch.equal(again.old_log_prob, rollout.old_log_prob)


def _loop(policy, schedule, negative, group, steps, latents=None):
    from flashgrpo_core.seeds import normal

    x = normal(SHAPE, group.noise_seeds[0])[None] if latents is None else latents
    for step in steps:
        high = schedule.sigmas[step] >= policy.boundary
        expert, guidance = (policy.experts[HIGH], 2.0) if high else (policy.experts[LOW], 1.5)
        t = float(schedule.timesteps[step])
        v = expert.velocity(x, t, embedding(group.prompt), negative, guidance)
        x = x + float(schedule.dt[step]) * v
    return x


def test_forwards_count_each_experts_guidance() -> None:
    policy, schedule = two(), make_schedule("simple", 6, 3.0)
    settings = RolloutSettings(SHAPE, guidance=2.0, guidance_low=1.0)
    counted = []
    for expert in policy.experts.values():
        expert.transformer.register_forward_pre_hook(
            lambda _, args, kwargs: counted.append(len(kwargs["hidden_states"])), with_kwargs=True
        )
    sampler = RolloutSampler(policy, schedule, settings, embedding, embedding("negative"))
    groups = tiny_groups(3, size=4, window=(0, 5))
    shares = [(g, range(s, s + 2)) for g in range(3) for s in (0, 2)]
    assert len(list(sampler.sample_all(groups, shares))) == 6
    assert sum(counted) == rollout_forwards(groups, sampler.schedule, settings, sampler.stages)


# ------------------------------------------------------------------------------------ start images


def test_the_first_frame_is_clean_and_told_so() -> None:
    latents, first = torch.randn(2, 16, 3, 4, 6), torch.randn(16, 1, 4, 6)
    inputs = model_inputs(latents, 700.0, StartImage(first=first), (1, 2, 2))
    assert torch.equal(inputs["hidden_states"][:, :, 0], first[:, 0].expand(2, -1, -1, -1))
    assert torch.equal(inputs["hidden_states"][:, :, 1:], latents[:, :, 1:])
    per_frame = 2 * 3
    assert inputs["timestep"].tolist() == [[0.0] * per_frame + [700.0] * 2 * per_frame] * 2
    velocity = torch.randn_like(latents)
    known = known_velocity(velocity, latents, first, 700.0)
    assert torch.equal(known[:, :, 1:], velocity[:, :, 1:])
    reached = latents[:, :, :1] - 0.7 * known[:, :, :1]
    assert torch.allclose(reached, first.expand_as(reached), atol=1e-5)


def test_channels_stand_behind_the_latents() -> None:
    latents = torch.randn(2, 16, 3, 4, 4)
    image = StartImage(torch.randn(20, 3, 4, 4), torch.randn(257, 8))
    inputs = model_inputs(latents, 500.0, image, (1, 2, 2))
    assert torch.equal(inputs["hidden_states"][:, :16], latents)
    assert torch.equal(inputs["hidden_states"][1, 16:], image.channels)
    assert inputs["timestep"].tolist() == [500.0, 500.0]
    assert inputs["encoder_hidden_states_image"].shape == (1, 257, 8)  # one row for all videos
