"""Rollouts: ODE everywhere except in the one stochastic step of the group.

With one initial noise per group all samples coincide until the SDE step. That prefix, the SDE
step's own forward included, is then computed once per group at batch size 1, and the same batch
size is used when the step is trained: the ratio before the first update is exactly 1, and the
trained step costs one forward and backward per group instead of one per video.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .conditioning import StartImage, find_image
from .control import Control
from .experts import LOW, Policy
from .groups import PromptGroup
from .kept import KeptGraphs
from .ode import integrate
from .policy import WanPolicy
from .schedule import TRAIN_STEPS, Schedule
from .sde import Transition, log_prob, sde_transition, transition_mean
from .seeds import normal
from .solver import multistep, suffix_sigmas
from .strategies import step_seed

#: Largest forward, in tokens (patches of 2x2 latents), that guidance is batched in by itself. Small
#: forwards cost mostly their overhead; large ones gain nothing and need memory for both halves.
BATCHED_TOKENS = 4096


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
        guidance_low: guidance scale of the low-noise expert; 0 is `guidance`.
        suffix_share: share of the steps after the SDE step that is taken; below 1 a second-order
            solver takes them.
        guidance_interval: noise levels `(low, high)`, inclusive, at which a rollout is guided;
            empty is all. Plain ODE sampling is guided everywhere.
        guidance_batched: `batched` puts both halves of guidance into one forward, `sequential` into
            two, `auto` batches as long as that forward has at most `BATCHED_TOKENS` tokens.
        cache_threshold: step caching of the finishing steps; 0 is off, see `WanPolicy.caching`.
    """

    latent_shape: tuple[int, int, int, int]
    guidance: float = 1.0
    kind: str = "flash"
    eta: float = 1.0
    shared_prefix: bool = True
    micro_batch: int = 4
    guidance_low: float = 0.0
    suffix_share: float = 1.0
    guidance_interval: tuple[float, ...] = ()
    guidance_batched: str = "auto"
    cache_threshold: float = 0.0

    @property
    def guided(self) -> bool:
        """Whether any step needs the negative prompt."""
        return self.guidance != 1.0 or self.guidance_low not in (0.0, 1.0)

    def guidance_of(self, expert: WanPolicy) -> float:
        """Guidance scale of a network."""
        return self.guidance_low if expert.name == LOW and self.guidance_low else self.guidance

    def guidance_at(self, guidance: float, sigma: float) -> float:
        """Guidance scale of a rollout at a noise level: 1 outside the guidance interval."""
        if not self.guidance_interval:
            return guidance
        low, high = self.guidance_interval
        return guidance if low <= sigma <= high else 1.0

    def batches(self, videos: int) -> bool:
        """Whether both halves of guidance go through the transformer in one forward.

        By sizes alone, so that rollout and update agree to the last bit.
        """
        if self.guidance_batched != "auto":
            return self.guidance_batched == "batched"
        _, frames, height, width = self.latent_shape
        return 2 * videos * frames * height * width // 4 <= BATCHED_TOKENS

    def shares(self, group: PromptGroup) -> bool:
        """Whether this group's prefix is computed once."""
        return self.shared_prefix and group.shared_noise and group.same_steps


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
        later: the transitions of further stochastic steps, each with `group` at that step; empty
            with Flash-GRPO.
        velocity: velocity at the SDE step, shaped as `latents`, with its graph; None when that was
            not kept.
    """

    group: PromptGroup
    samples: range
    latents: torch.Tensor
    latents_next: torch.Tensor
    old_log_prob: torch.Tensor
    final: torch.Tensor
    later: list[Rollout] = field(default_factory=list)
    velocity: torch.Tensor | None = None


def sample_shares(groups: Sequence[PromptGroup], micro_batch: int) -> list[tuple[int, range]]:
    """The work of a rollout phase: (group index, sample range), cut inside groups, in order.

    Samples that are stochastic at different steps never share a micro-batch.
    """
    return [
        (g, range(start, min(start + micro_batch, alike.stop)))
        for g, group in enumerate(groups)
        for alike in _alike(group)
        for start in range(alike.start, alike.stop, micro_batch)
    ]


def _alike(group: PromptGroup) -> list[range]:
    """Stretches of neighbouring samples with the same stochastic steps."""
    if group.same_steps:
        return [range(group.size)]
    steps = group.sample_steps
    edges = [i for i in range(1, group.size) if steps[i] != steps[i - 1]]
    return [range(a, b) for a, b in zip([0, *edges], [*edges, group.size], strict=True)]


class RolloutSampler:
    """Samples rollouts of groups; keeps the prefix of the newest group for its other samples.

    Args:
        policy: the sampling policy.
        schedule: noise levels.
        settings: sizes and options.
        context: prompt -> embedding `[tokens, text_dim]`.
        negative: embedding of the negative prompt, or None without guidance.
        control: the host; networks are brought as they are needed.
        images: path of a start image -> its encoding; None samples from text only.
        keep_graph: GiB for the graphs of trained forwards, see `KeptGraphs`. Only for networks that
            stay where they are and whose weights do not change until the update.
    """

    def __init__(
        self,
        policy: Policy,
        schedule: Schedule,
        settings: RolloutSettings,
        context: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor],
        negative: torch.Tensor | None,
        control: Control | None = None,
        images: Callable[[str], StartImage] | None = None,
        keep_graph: float = 0.0,
    ) -> None:
        self.policy = policy
        self.kept = KeptGraphs(policy, keep_graph)
        self.schedule = schedule
        self.settings = settings
        self.context = context if callable(context) else context.__getitem__
        self.negative = negative
        self.control = control or Control()
        self.images = images
        self.stages = policy.stages(schedule)
        self._resident: WanPolicy | None = None
        self._prefix: tuple[PromptGroup, torch.Tensor, torch.Tensor] | None = None
        #: Latents at the switch between experts of groups whose SDE step comes later, by group id
        #: and first sample.
        self._carried: dict[tuple[str, int], torch.Tensor] = {}

    def transition(self, group: PromptGroup) -> Transition:
        """The group's stochastic step."""
        return sde_transition(self.schedule, group.sde_step, self.settings.kind, self.settings.eta)

    def expert(self, group: PromptGroup) -> WanPolicy:
        """The network of the group's SDE step."""
        return next(expert for expert, steps in self.stages if group.sde_step in steps)

    def _guidance(self, expert: WanPolicy) -> Callable[[float], float]:
        """Guidance scale of a network's rollouts by noise level."""
        scale = self.settings.guidance_of(expert)
        return lambda sigma: self.settings.guidance_at(scale, sigma)

    def guidance_of(self, group: PromptGroup) -> float:
        """Guidance scale at the group's SDE step."""
        sigma = float(self.schedule.sigmas[group.sde_step])
        return self._guidance(self.expert(group))(sigma)

    def bring(self, expert: WanPolicy) -> None:
        """Make a network resident, unless it was the last one."""
        if self._resident is not expert:
            self.control.bring(expert.transformer)
            self._resident = expert

    def _integrate(
        self, group: PromptGroup, latents: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """ODE steps `[first, end)`, by the network of each."""
        for expert, own in self.stages:
            steps = range(max(first, own.start), min(end, own.stop))
            if not steps:
                continue
            self.bring(expert)
            latents = integrate(
                expert,
                latents.to(expert.device),
                self.schedule,
                steps,
                self.context(group.prompt),
                self.negative,
                self._guidance(expert),
                self.control,
                find_image(self.images, group.start_image),
                batched=self.settings.batches(len(latents)),
            )
        return latents

    def _finish(
        self, group: PromptGroup, latents: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """The steps that only the reward sees, made cheaper as the settings say."""
        settings, expert = self.settings, self.stages[-1][0]
        with expert.caching(settings.cache_threshold if first < end else 0.0):
            if settings.suffix_share == 1.0:
                return self._integrate(group, latents, first, end)
            self.bring(expert)
            context = self.context(group.prompt)
            image = find_image(self.images, group.start_image)
            guidance, batched = self._guidance(expert), settings.batches(len(latents))

            def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
                self.control.check()
                timestep, scale = TRAIN_STEPS * sigma, guidance(sigma)
                return expert.velocity(
                    x, timestep, context, self.negative, scale, image, batched=batched
                )

            sigmas = suffix_sigmas(self.schedule.sigmas, first, settings.suffix_share)
            return multistep(velocity, latents.to(expert.device), sigmas)

    def _key(self, group: PromptGroup, samples: range) -> tuple[str, int]:
        return group.group_id, 0 if self.settings.shares(group) else samples.start

    @torch.no_grad()
    def start(self, group: PromptGroup, samples: range, end: int | None = None) -> torch.Tensor:
        """Latents before the SDE step, or before step `end`: `[n, ...]`, `[1, ...]` when shared."""
        end = group.sde_step if end is None else end
        carried = self._carried.get(self._key(group, samples))
        if carried is not None:
            return self._integrate(group, carried, self.stages[-1][1].start, end)
        seeds = (
            group.noise_seeds[:1]
            if self.settings.shares(group)
            else group.noise_seeds[samples.start : samples.stop]
        )
        noise = torch.stack([normal(self.settings.latent_shape, s) for s in seeds])
        return self._integrate(group, noise, 0, end)

    def velocity(self, group: PromptGroup, latents: torch.Tensor) -> torch.Tensor:
        """Velocity at the group's SDE step; the one call that rollout and update share."""
        self.control.check()
        expert = self.expert(group)
        self.bring(expert)
        return expert.velocity(
            latents.to(expert.device),
            float(self.schedule.timesteps[group.sde_step]),
            self.context(group.prompt),
            self.negative,
            self.guidance_of(group),
            find_image(self.images, group.start_image),
            batched=self.settings.batches(len(latents)),
        )

    def _trained_velocity(self, group: PromptGroup, latents: torch.Tensor) -> torch.Tensor:
        """`velocity`, with its graph if that is kept."""
        kind = (self.expert(group).name, len(latents), self.guidance_of(group) != 1.0)
        return self.kept.forward(kind, lambda: self.velocity(group, latents))

    def _prefix_of(self, group: PromptGroup, samples: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents before the SDE step and the velocity there, from the cache when shared."""
        if not self.settings.shares(group):
            latents = self.start(group, samples)
            return latents, self._trained_velocity(group, latents)
        # The whole group is the key: its id is the same again in the next iteration.
        if self._prefix is None or self._prefix[0] != group:
            latents = self.start(group, samples)
            self._prefix = (group, latents, self._trained_velocity(group, latents))
        return self._prefix[1], self._prefix[2]

    @torch.no_grad()
    def transition_of(self, group: PromptGroup, samples: range | None = None) -> Rollout:
        """The recorded transition of some samples (default all), without finishing the videos.

        Everything is drawn from the group's seeds, so any process gets the same numbers.
        """
        samples = range(group.size) if samples is None else samples
        latents, velocity = self._prefix_of(group, samples)
        return self._record(group, samples, latents, velocity, list(group.sde_seeds))

    def _record(
        self,
        group: PromptGroup,
        samples: range,
        latents: torch.Tensor,
        velocity: torch.Tensor,
        seeds: Sequence[int],
    ) -> Rollout:
        """Take the stochastic step of some samples; `seeds` has one for each of the group."""
        step = self.transition(group)
        mean = transition_mean(step, latents.to(velocity.device), velocity)
        noise = torch.stack([normal(self.settings.latent_shape, seeds[i]) for i in samples])
        latents_next = mean + step.noise_std * noise.to(mean.device)  # [n, C, T, H, W]
        if step.noise_std > 0:
            old_log_prob = log_prob(step, latents_next, mean)
        else:
            old_log_prob = torch.zeros(len(samples))
        return Rollout(
            group,
            samples,
            latents.cpu(),
            latents_next.cpu(),
            old_log_prob.cpu(),
            torch.empty(0),
            velocity=velocity if velocity.requires_grad else None,
        )

    def sample(self, group: PromptGroup, samples: range) -> Rollout:
        """Roll out some samples of a group to finished latents."""
        return next(self.sample_all([group], [(0, samples)]))

    @torch.no_grad()
    def sample_all(
        self, groups: Sequence[PromptGroup], shares: Sequence[tuple[int, range]]
    ) -> Iterator[Rollout]:
        """Roll out shares `(group index, samples)` to finished latents, in order, as they finish.

        With two experts everything passes the high-noise one before the low-noise one is needed:
        one change of networks, not one per video.
        """
        begun: dict[int, Rollout] = {}
        for expert, steps in self.stages:
            self.bring(expert)
            for i, (g, samples) in enumerate(shares):
                group = groups[g]
                if i not in begun and group.sde_step not in steps:
                    key = self._key(group, samples)
                    if key not in self._carried:
                        self._carried[key] = self.start(group, samples, steps.stop).cpu()
                    continue
                if i in begun:
                    latents, first = begun[i].final, steps.start
                else:
                    begun[i], latents, first = self._stochastic_part(group, samples)
                # With no step left, as before the switch, the latents stay what they are.
                go = self._finish if steps.stop == self.schedule.steps else self._integrate
                begun[i].final = go(group, latents, first, steps.stop).cpu()
                if steps.stop == self.schedule.steps:
                    self.control.tick(len(samples))
                    yield begun[i]

    def _stochastic_part(
        self, group: PromptGroup, samples: range
    ) -> tuple[Rollout, torch.Tensor, int]:
        """Samples up to their last stochastic step: transitions, latents, and the step after it."""
        own = group.steps_of(samples.start)
        if not own:
            # Pure ODE. One step of the schedule first: the solver of a shortened rest starts below 1.
            nothing = torch.empty(0)
            rollout = Rollout(group, samples, nothing, nothing, nothing, nothing)
            return rollout, self.start(group, samples, 1), 1
        rollout = self.transition_of(group.at(own[0]), samples)
        latents, done = rollout.latents_next, own[0] + 1
        for step in own[1:]:
            latents = self._integrate(group, latents, done, step)
            here = group.at(step)
            seeds = [step_seed(group, i, step) for i in range(group.size)]
            velocity = self._trained_velocity(here, latents)
            record = self._record(here, samples, latents, velocity, seeds)
            rollout.later.append(record)
            latents, done = record.latents_next, step + 1
        return rollout, latents, done

    def forget(self) -> None:
        """Drop what was cached of the samples; call it whenever the policy has changed."""
        self._prefix = None
        self._carried.clear()
        self._resident = None
