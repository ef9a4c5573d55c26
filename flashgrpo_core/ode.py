"""Deterministic sampling: the Euler steps of a schedule, and whole videos made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .conditioning import StartImage
from .control import Control
from .experts import Policy
from .policy import WanPolicy
from .schedule import Schedule
from .sde import ode_transition, transition_mean
from .seeds import normal

if TYPE_CHECKING:
    from .rollout import RolloutSettings


@torch.no_grad()
def integrate(
    policy: WanPolicy,
    latents: torch.Tensor,
    schedule: Schedule,
    steps: range,
    context: torch.Tensor,
    negative: torch.Tensor | None,
    guidance: Callable[[float], float],
    control: Control,
    image: StartImage | None = None,
    *,
    batched: bool = False,
) -> torch.Tensor:
    """Euler ODE steps `steps` of the schedule on latents `[B, C, T, H, W]`.

    `guidance` gives the scale at a noise level; `batched` see `WanPolicy.velocity`.
    """
    for step in steps:
        control.check()
        scale = guidance(float(schedule.sigmas[step]))
        timestep = float(schedule.timesteps[step])
        velocity = policy.velocity(
            latents, timestep, context, negative, scale, image, batched=batched
        )
        latents = transition_mean(ode_transition(schedule, step), latents, velocity)
    return latents


@dataclass(frozen=True)
class OdeJob:
    """Videos of one prompt for `sample_all_ode`: a seed of the initial noise for each."""

    seeds: Sequence[int]
    context: torch.Tensor
    image: StartImage | None = None


def sample_ode(
    policy: Policy,
    seeds: Sequence[int],
    schedule: Schedule,
    settings: RolloutSettings,
    context: torch.Tensor,
    negative: torch.Tensor | None = None,
    control: Control | None = None,
    image: StartImage | None = None,
) -> torch.Tensor:
    """Plain ODE sampling of one prompt; see `sample_all_ode`."""
    job = OdeJob(seeds, context, image)
    return sample_all_ode(policy, [job], schedule, settings, negative, control)[0]


@torch.no_grad()
def sample_all_ode(
    policy: Policy,
    jobs: Sequence[OdeJob],
    schedule: Schedule,
    settings: RolloutSettings,
    negative: torch.Tensor | None = None,
    control: Control | None = None,
) -> list[torch.Tensor]:
    """Plain ODE sampling from the initial noise of each seed, one expert after the other.

    Guided at every step, whatever the guidance interval of rollouts: this is how the trained LoRA
    is used, and so what is judged.

    Returns:
        Per job the final latents, float32 `[len(seeds), C, T, H, W]` on the CPU.
    """
    control = control or Control()
    found: list[list[torch.Tensor]] = [[] for _ in jobs]
    for expert, steps in policy.stages(schedule):
        control.bring(expert.transformer)
        for job, parts in zip(jobs, found, strict=True):
            for i, start in enumerate(range(0, len(job.seeds), settings.micro_batch)):
                seeds = job.seeds[start : start + settings.micro_batch]
                if steps.start == 0:
                    parts.append(torch.stack([normal(settings.latent_shape, s) for s in seeds]))
                scale = settings.guidance_of(expert)
                latents = integrate(
                    expert,
                    parts[i].to(expert.device),  # [B, C, T, H, W]
                    schedule,
                    steps,
                    job.context,
                    negative,
                    lambda sigma, scale=scale: scale,  # type: ignore[misc]
                    control,
                    job.image,
                    batched=settings.batches(len(seeds)),
                )
                parts[i] = latents.cpu()
                if steps.stop == schedule.steps:
                    control.tick(len(seeds))
    return [torch.cat(parts) for parts in found]
