"""DiffusionNFT (arXiv 2509.16117): a policy update without likelihoods and without an SDE.

Videos are sampled by the plain ODE, so any solver will do and only their final latents x0 count.
Each is noised anew by the forward process and the velocity is regressed on it, towards the videos
that did better than their group and away from the others. With v the policy's velocity, v_old that
of the policy that sampled, u = noise - x0 and the optimality r of a video in [0, 1],

    x  = (1 - sigma) x0 + sigma noise
    v+ = v_old + beta (v - v_old),   v- = v_old - beta (v - v_old)
    r  = clip(A / (2 A_max) + 1/2, 0, 1)
    L  = A_max / beta (r m(v+) + (1 - r) m(v-))
    m(v) = mean |x0_hat - x0|^2 / mean |x0_hat - x0|,   x0_hat = x - sigma v

The divisor of m (no gradient goes through it) gives every noise level about the same say. A_max / beta
makes the gradient at v = v_old, -2 A sigma (u - v_old) / mean|..|, free of both: beta matters only
from the second update of a rollout batch on.

Two choices of ours. The policy that samples is always the newest one, not a moving average of it:
in the first update v_old is v itself, without gradient, and later updates of the same batch take it
from there, so v_old never costs a forward. And all videos of a group are noised to the same levels
(as they share an SDE step in Flash-GRPO), which are dealt to the groups by random permutations of
the schedule. With guidance, v is the guided velocity: the policy is what is sampled with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .config import LossConfig
from .control import Control
from .distributed import World
from .errors import FlashGRPOError
from .experts import Policy
from .gradients import GradientSum
from .groups import PromptGroup
from .policy import forwards_per_velocity
from .rollout import Rollout, RolloutSampler
from .seeds import derive_seed, generator, normal
from .update import GradientStats

#: Smallest divisor of the adaptive weighting.
LEAST_ERROR = 1e-5


@dataclass
class Noised:
    """One backward pass: videos of a micro-batch at one noise level.

    Attributes:
        row: index of the group in the update.
        group: the group at the step of the noise level.
        samples: which samples of the group.
        clean: final latents x0, `[n, C, T, H, W]`, CPU.
        seeds: seed of the forward process's noise per sample.
        old: velocity of the policy that sampled, `[n, C, T, H, W]`, CPU; None before the first update.
    """

    row: int
    group: PromptGroup
    samples: range
    clean: torch.Tensor
    seeds: list[int]
    old: torch.Tensor | None = None


def noise_levels(
    groups: int, levels: int, steps: Sequence[int], run_seed: int, iteration: int
) -> list[list[int]]:
    """Steps whose sigma each group is noised to, `levels` of them per group.

    Random permutations of `steps` one after the other, so that an update covers the schedule evenly.
    """
    rng = generator(run_seed, iteration, "noise levels")
    drawn: list[int] = []
    while len(drawn) < groups * levels:
        drawn += [steps[int(i)] for i in torch.randperm(len(steps), generator=rng)]
    return [drawn[g * levels : (g + 1) * levels] for g in range(groups)]


def noised_units(
    sampler: RolloutSampler,
    groups: Sequence[PromptGroup],
    rollouts: Sequence[Rollout],
    levels: int,
    run_seed: int,
    iteration: int,
) -> list[Noised]:
    """The backward passes of this rank; everything is drawn from seeds, whatever the split."""
    trained = [e for e, _ in sampler.stages if e.trained]
    steps = [k for expert, own in sampler.stages if expert in trained for k in own]
    drawn = noise_levels(len(groups), levels, steps, run_seed, iteration)
    row_of = {group.group_id: row for row, group in enumerate(groups)}
    units = []
    for rollout in rollouts:
        row = row_of[rollout.group.group_id]
        for j, step in enumerate(drawn[row]):
            seeds = [
                derive_seed(rollout.group.sde_seeds[i], j, "forward noise") for i in rollout.samples
            ]
            at = rollout.group.at(step)
            units.append(Noised(row, at, rollout.samples, rollout.final, seeds))
    # All of one expert, then all of the other: each is needed on the device once.
    order = [expert for expert, _ in sampler.stages]
    units.sort(key=lambda unit: order.index(sampler.expert(unit.group)))
    return units


def optimality(advantages: torch.Tensor, limit: float) -> torch.Tensor:
    """Share of a video that counts as good: r = clip(A / (2 A_max) + 1/2, 0, 1)."""
    return (advantages / (2 * limit) + 0.5).clamp(0.0, 1.0)


def nft_loss(
    velocity: torch.Tensor,
    old: torch.Tensor,
    latents: torch.Tensor,
    clean: torch.Tensor,
    sigma: float,
    good: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """Loss per sample, (r m(v+) + (1 - r) m(v-)) / beta; see the module.

    Args:
        velocity: `[B, C, T, H, W]`, with gradient.
        old: velocity of the policy that sampled, same shape.
        latents: x, the noised videos.
        clean: x0.
        sigma: their noise level.
        good: optimality r, `[B]`.
        beta: how far v+ and v- lie from v_old.

    Returns:
        `[B]`.
    """
    shift = beta * (velocity - old.detach())

    def matching(v: torch.Tensor) -> torch.Tensor:
        error = (latents - sigma * v - clean).flatten(1)
        size = error.detach().abs().mean(1).clamp(min=LEAST_ERROR)
        return error.square().mean(1) / size

    return (good * matching(old + shift) + (1 - good) * matching(old - shift)) / beta


def nft_gradient(
    policy: Policy,
    sampler: RolloutSampler,
    units: Sequence[Noised],
    advantages: np.ndarray,
    used: np.ndarray,
    loss: LossConfig,
    *,
    control: Control | None = None,
    world: World | None = None,
) -> tuple[dict[str, torch.Tensor], GradientStats]:
    """Gradient of the mean loss over all noised videos of the update.

    Args:
        policy: the policy; only its LoRA gets a gradient.
        sampler: the sampler that made the rollouts.
        units: this rank's backward passes, see `noised_units`; they remember v_old.
        advantages: float64 `[P, G]`.
        used: bool `[P, G]`, samples that enter the loss.
        loss: loss settings; its `kl` weighs mean (v - v_ref)^2.
        control: the host.
        world: the processes.

    Returns:
        Gradients by parameter name, float64, and statistics; there is no ratio and no clip.

    Raises:
        FlashGRPOError: no sample is used.
    """
    control, world = control or Control(), world or World()
    count = int(used.sum()) * loss.nft_levels
    if count == 0:
        raise FlashGRPOError("no sample of this update has a usable advantage: nothing to train on")
    gradient = GradientSum(policy)
    norms = np.zeros((sampler.schedule.steps, 2))  # per step: squared norms, their number
    sums = np.zeros(4)  # loss, KL, forwards with and without gradient
    shape = sampler.settings.latent_shape
    for unit in units:
        part = slice(unit.samples.start, unit.samples.stop)
        chosen = torch.from_numpy(used[unit.row, part])
        if not bool(chosen.any()):
            continue
        control.check()
        expert = sampler.expert(unit.group)
        sampler.bring(expert)
        sigma = float(sampler.schedule.sigmas[unit.group.sde_step])
        guidance = sampler.settings.guidance_at(sampler.settings.guidance_of(expert), sigma)
        forwards = len(unit.samples) * forwards_per_velocity(guidance)
        clean = unit.clean.to(expert.device)
        noise = torch.stack([normal(shape, seed) for seed in unit.seeds]).to(expert.device)
        latents = (1 - sigma) * clean + sigma * noise  # [n, C, T, H, W]
        reference = None
        if loss.kl > 0:
            # Before the graph is built: a continued LoRA's reference swaps the weights in place.
            with torch.no_grad(), policy.reference():
                reference = sampler.velocity(unit.group, latents)
            sums[3] += forwards
        velocity = sampler.velocity(unit.group, latents)
        sums[2] += forwards
        if unit.old is None:
            unit.old = velocity.detach().cpu()
        values = torch.from_numpy(advantages[unit.row, part]).to(velocity)
        good = optimality(values, loss.advantage_clamp)
        old = unit.old.to(velocity)
        each = nft_loss(velocity, old, latents, clean, sigma, good, loss.nft_beta)
        keep = chosen.to(expert.device)
        unit_loss = loss.advantage_clamp * each[keep].sum() / count
        if reference is not None:
            kl = (velocity - reference).square().flatten(1).mean(1)[keep].sum()
            unit_loss = unit_loss + loss.kl * kl / count
            sums[1] += kl.item()
        if world.lockstep is None:  # else the others are in this backward pass with us already
            control.check()
        unit_loss.backward()
        norm = gradient.take() * count / int(chosen.sum())
        norms[unit.group.sde_step] += [norm**2, 1.0]
        sums[0] += unit_loss.item()
        control.tick()
    world.rest()
    total = gradient.total(world)
    norms, sums = world.sum_array(norms), world.sum_array(sums)
    by_step = {k: math.sqrt(n[0] / n[1]) for k, n in enumerate(norms) if n[1] > 0}
    return total, GradientStats(
        loss=float(sums[0]),
        kl=float(sums[1]) / count,
        by_step={k: {"raw": norm, "rectified": norm} for k, norm in by_step.items()},
        forwards=int(sums[2]),
        plain_forwards=int(sums[3]),
    )
