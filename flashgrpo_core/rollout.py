"""Rollouts: ODE everywhere except in the one stochastic step of the group.

With one initial noise per group all samples coincide until the SDE step. That prefix, the SDE
step's own forward included, is then computed once per group at batch size 1, and the same batch
size is used when the step is trained: the ratio before the first update is exactly 1, and the
trained step costs one forward and backward per group instead of one per video.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .control import Control
from .groups import PromptGroup
from .policy import WanPolicy, forwards_per_velocity
from .schedule import Schedule
from .sde import Transition, log_prob, ode_transition, sde_transition, transition_mean
from .seeds import normal


@dataclass(frozen=True)
class RolloutSettings:
    """How rollouts are computed.

    Attributes:
        latent_shape: `(C, T, H, W)` of one video's latents.
        guidance: classifier-free guidance scale.
        kind: SDE kind.
        eta: SDE noise scale.
        shared_prefix: use one computation for the common prefix of a group with shared noise.
        micro_batch: videos of a group per transformer call.
    """

    latent_shape: tuple[int, int, int, int]
    guidance: float = 1.0
    kind: str = "flash"
    eta: float = 1.0
    shared_prefix: bool = True
    micro_batch: int = 4

    def shares(self, group: PromptGroup) -> bool:
        """Whether this group's prefix is computed once."""
        return self.shared_prefix and group.shared_noise


@dataclass
class Rollout:
    """The recorded transition and the result of some samples of one group; CPU, float32.

    Attributes:
        group: the prompt group.
        samples: which samples of the group these are (indices, in order), n of them.
        latents: latents before the SDE step, `[n, C, T, H, W]`, or `[1, ...]` with shared prefix.
        latents_next: latents after it, `[n, C, T, H, W]`.
        old_log_prob: log-probability of the step under the sampling policy, `[n]`.
        final: latents of the finished videos, `[n, C, T, H, W]`.
    """

    group: PromptGroup
    samples: range
    latents: torch.Tensor
    latents_next: torch.Tensor
    old_log_prob: torch.Tensor
    final: torch.Tensor


def sample_shares(groups: Sequence[PromptGroup], micro_batch: int) -> list[tuple[int, range]]:
    """The work of a rollout phase: (group index, sample range), cut inside groups, in order."""
    return [
        (g, range(start, min(start + micro_batch, group.size)))
        for g, group in enumerate(groups)
        for start in range(0, group.size, micro_batch)
    ]


def rollout_forwards(groups: Sequence[PromptGroup], steps: int, settings: RolloutSettings) -> int:
    """Transformer forwards (per video) that sampling these groups takes."""
    total = 0
    for group in groups:
        if settings.shares(group):
            prefix = group.sde_step + 1
            total += prefix + group.size * (steps - prefix)
        else:
            total += group.size * steps
    return total * forwards_per_velocity(settings.guidance)


@torch.no_grad()
def integrate(
    policy: WanPolicy,
    latents: torch.Tensor,
    schedule: Schedule,
    steps: range,
    context: torch.Tensor,
    negative: torch.Tensor | None,
    guidance: float,
    control: Control,
) -> torch.Tensor:
    """Euler ODE steps `steps` of the schedule on latents `[B, C, T, H, W]`."""
    for step in steps:
        control.check()
        velocity = policy.velocity(
            latents, float(schedule.timesteps[step]), context, negative, guidance
        )
        latents = transition_mean(ode_transition(schedule, step), latents, velocity)
    return latents


@torch.no_grad()
def sample_ode(
    policy: WanPolicy,
    seeds: Sequence[int],
    schedule: Schedule,
    settings: RolloutSettings,
    context: torch.Tensor,
    negative: torch.Tensor | None = None,
    control: Control | None = None,
) -> torch.Tensor:
    """Plain ODE sampling of one prompt from the initial noise of each seed.

    Returns:
        Final latents float32 `[len(seeds), C, T, H, W]` on the CPU.
    """
    control = control or Control()
    finals = []
    for start in range(0, len(seeds), settings.micro_batch):
        noise = [
            normal(settings.latent_shape, s) for s in seeds[start : start + settings.micro_batch]
        ]
        latents = torch.stack(noise).to(policy.device)  # [B, C, T, H, W]
        latents = integrate(
            policy,
            latents,
            schedule,
            range(schedule.steps),
            context,
            negative,
            settings.guidance,
            control,
        )
        finals.append(latents.cpu())
        control.tick(len(noise))
    return torch.cat(finals)


class RolloutSampler:
    """Samples rollouts of groups; keeps the prefix of the newest group for its other samples.

    Args:
        policy: the sampling policy.
        schedule: noise levels.
        settings: sizes and options.
        context: prompt -> embedding `[tokens, text_dim]`.
        negative: embedding of the negative prompt, or None without guidance.
        control: the host.
    """

    def __init__(
        self,
        policy: WanPolicy,
        schedule: Schedule,
        settings: RolloutSettings,
        context: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor],
        negative: torch.Tensor | None,
        control: Control | None = None,
    ) -> None:
        self.policy = policy
        self.schedule = schedule
        self.settings = settings
        self.context = context if callable(context) else context.__getitem__
        self.negative = negative
        self.control = control or Control()
        self._prefix: tuple[PromptGroup, torch.Tensor, torch.Tensor] | None = None

    def transition(self, group: PromptGroup) -> Transition:
        """The group's stochastic step."""
        return sde_transition(self.schedule, group.sde_step, self.settings.kind, self.settings.eta)

    @torch.no_grad()
    def start(self, group: PromptGroup, samples: range) -> torch.Tensor:
        """Latents before the SDE step, on the device: `[n, ...]`, or `[1, ...]` when shared."""
        seeds = (
            group.noise_seeds[:1]
            if self.settings.shares(group)
            else group.noise_seeds[samples.start : samples.stop]
        )
        noise = torch.stack([normal(self.settings.latent_shape, s) for s in seeds])
        return integrate(
            self.policy,
            noise.to(self.policy.device),
            self.schedule,
            range(group.sde_step),
            self.context(group.prompt),
            self.negative,
            self.settings.guidance,
            self.control,
        )

    def velocity(self, group: PromptGroup, latents: torch.Tensor) -> torch.Tensor:
        """Velocity at the group's SDE step; the one call that rollout and update share."""
        self.control.check()
        return self.policy.velocity(
            latents,
            float(self.schedule.timesteps[group.sde_step]),
            self.context(group.prompt),
            self.negative,
            self.settings.guidance,
        )

    def _prefix_of(self, group: PromptGroup, samples: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents before the SDE step and the velocity there, from the cache when shared."""
        if not self.settings.shares(group):
            latents = self.start(group, samples)
            return latents, self.velocity(group, latents)
        # The whole group is the key: its id is the same again in the next iteration.
        if self._prefix is None or self._prefix[0] != group:
            latents = self.start(group, samples)
            self._prefix = (group, latents, self.velocity(group, latents))
        return self._prefix[1], self._prefix[2]

    @torch.no_grad()
    def transition_of(self, group: PromptGroup, samples: range | None = None) -> Rollout:
        """The recorded transition of some samples (default all), without finishing the videos.

        Everything is drawn from the group's seeds, so any process gets the same numbers.
        """
        samples = range(group.size) if samples is None else samples
        latents, velocity = self._prefix_of(group, samples)
        step = self.transition(group)
        mean = transition_mean(step, latents, velocity)
        noise = torch.stack(
            [normal(self.settings.latent_shape, group.sde_seeds[i]) for i in samples]
        )
        latents_next = mean + step.noise_std * noise.to(mean.device)  # [n, C, T, H, W]
        if step.noise_std > 0:
            old_log_prob = log_prob(step, latents_next, mean)
        else:
            old_log_prob = torch.zeros(len(samples))
        return Rollout(
            group, samples, latents.cpu(), latents_next.cpu(), old_log_prob.cpu(), torch.empty(0)
        )

    @torch.no_grad()
    def sample(self, group: PromptGroup, samples: range) -> Rollout:
        """Roll out some samples of a group to finished latents."""
        rollout = self.transition_of(group, samples)
        rollout.final = integrate(
            self.policy,
            rollout.latents_next.to(self.policy.device),
            self.schedule,
            range(group.sde_step + 1, self.schedule.steps),
            self.context(group.prompt),
            self.negative,
            self.settings.guidance,
            self.control,
        ).cpu()
        self.control.tick(len(samples))
        return rollout

    def forget(self) -> None:
        """Drop the cached prefix; call it whenever the policy has changed."""
        self._prefix = None
