"""The train step: policy gradient of the recorded transitions, and AdamW on the LoRA."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from .adam import Adam
from .config import LossConfig, OptimConfig
from .control import Control
from .distributed import World
from .errors import FlashGRPOError
from .experts import Policy
from .gradients import GradientSum
from .groups import PromptGroup
from .loss import policy_loss, window_weights
from .policy import forwards_per_velocity
from .rollout import Rollout, RolloutSampler
from .sde import Transition, kl_divergence, log_prob, step_divergence, transition_mean
from .seeds import normal
from .signals import SKETCH, Sketcher
from .strategies import step_seed, trained_transitions


@dataclass
class GradientStats:
    """What one pass over an update's transitions measured.

    Attributes:
        loss: clipped loss plus weighted KL, mean over the used samples.
        kl: mean KL to the reference policy (0 when its weight is 0).
        ratio_drift: largest |log ratio|; before the first update this is numerical noise.
        clip_fraction: share of used samples whose gradient the clip cut.
        by_step: SDE step -> root mean square over its groups of the LoRA gradient norm of the
            group's mean loss, before (`raw`) and after (`rectified`) the weight.
        forwards: transformer forwards with gradient, per video.
        plain_forwards: those without, of the reference policy.
        reused: forwards with gradient whose graph was kept from the rollout.
        sketches: sketch of each group's rectified gradient, float32 `[P, SKETCH]`, if asked for.
    """

    loss: float = 0.0
    kl: float = 0.0
    ratio_drift: float = 0.0
    clip_fraction: float = 0.0
    by_step: dict[int, dict[str, float]] = field(default_factory=dict)
    forwards: int = 0
    plain_forwards: int = 0
    reused: int = 0
    sketches: np.ndarray | None = None


@dataclass
class Unit:
    """One backward pass: a whole group with shared prefix, or a micro-batch of one.

    Attributes:
        row: index of the group in the update.
        group: the group.
        rollout: the recorded transition of its samples.
    """

    row: int
    group: PromptGroup
    rollout: Rollout


def policy_gradient(
    policy: Policy,
    sampler: RolloutSampler,
    groups: Sequence[PromptGroup],
    units: Sequence[Unit],
    advantages: np.ndarray,
    used: np.ndarray,
    loss: LossConfig,
    window: tuple[int, int] | Sequence[tuple[int, int]],
    *,
    control: Control | None = None,
    world: World | None = None,
    sketch: bool = False,
) -> tuple[dict[str, torch.Tensor], GradientStats]:
    """Gradient of the rectified, clipped loss over all trained transitions of the update.

    The loss is a mean over the transitions of the used samples of all ranks, so the result does not depend on how
    the work is cut; sums run in float64, so it does not depend on the order either.

    Args:
        policy: the policy; only its LoRA gets a gradient.
        sampler: the sampler that made the rollouts (same guidance, same batch shapes).
        groups: all groups of the update.
        units: this rank's backward passes, see `update_units`.
        advantages: float64 `[P, G]`.
        used: bool `[P, G]`, samples that enter the loss.
        loss: loss settings.
        window: the eligible SDE steps; one window for each trained expert.
        control: the host.
        world: the processes.
        sketch: measure what `schedule.adaptive` draws by.

    Returns:
        Gradients by parameter name, float64, and statistics.

    Raises:
        FlashGRPOError: no sample is used.
    """
    control, world = control or Control(), world or World()
    trained = [
        (row, step, n)
        for row, group in enumerate(groups)
        for step, n in trained_transitions(group, used[row]).items()
    ]
    count = sum(n for _, _, n in trained)
    if count == 0:
        raise FlashGRPOError("no sample of this update has a usable advantage: nothing to train on")
    settings = sampler.settings
    found = window_weights(
        [step for _, step, _ in trained],
        sampler.schedule,
        window,
        kind=settings.kind,
        eta=settings.eta,
        normaliser=loss.rectification,
        counts=[n for _, _, n in trained],
        ratio=loss.ratio,
    )
    weights = {(row, step): float(w) for (row, step, _), w in zip(trained, found, strict=True)}
    gradient = GradientSum(policy, Sketcher() if sketch else None)
    sketches = np.zeros((len(groups), SKETCH))
    # Per step: sum over its groups of the squared norms (raw, rectified) and their number.
    norms = np.zeros((sampler.schedule.steps, 3))
    sums = np.zeros(3)  # loss, KL, clipped samples
    drift = 0.0
    forwards = plain = reused = 0
    for unit in units:
        row, rollout = unit.row, unit.rollout
        velocity, rollout.velocity = rollout.velocity, None  # good for one update only
        weight = weights[row, unit.group.sde_step]
        mask = torch.from_numpy(used[row, rollout.samples.start : rollout.samples.stop])
        if not bool(mask.any()):
            continue
        control.check()
        step = sampler.transition(unit.group)
        expert = sampler.expert(unit.group)
        sampler.bring(expert)
        latents = rollout.latents.to(expert.device)
        reference = None
        if loss.kl > 0:
            # Before the graph is built: a continued LoRA's reference swaps the weights in place.
            with torch.no_grad(), policy.reference():
                reference = sampler.velocity(unit.group, latents)
            plain += len(latents) * forwards_per_velocity(sampler.guidance_of(unit.group))
        own = len(latents) * forwards_per_velocity(sampler.guidance_of(unit.group))
        if velocity is None:
            velocity = sampler.velocity(unit.group, latents)
        else:
            reused += own
        forwards += own
        mean = transition_mean(step, latents, velocity)
        new = log_prob(step, rollout.latents_next.to(expert.device), mean)
        chosen = mask.to(expert.device)
        values = torch.from_numpy(advantages[row, rollout.samples.start : rollout.samples.stop]).to(
            new
        )
        important = weight * unit.group.importance
        change = None
        if loss.ratio == "guard" or loss.mask == "kl":
            change = step_divergence(step, mean, sampled_mean(step, rollout).to(mean))
        per_sample, ratio, cut = policy_loss(
            new,
            rollout.old_log_prob.to(new),
            values,
            important,
            loss.clip,
            change=change,
            guard=step.noise_std if loss.ratio == "guard" else 0.0,
            threshold=loss.kl_threshold if loss.mask == "kl" else 0.0,
        )
        unit_loss = per_sample[chosen].sum() / count
        if reference is not None:
            kl = kl_divergence(step, velocity, reference).expand(len(mask))[chosen].sum()
            unit_loss = unit_loss + loss.kl * unit.group.importance * kl / count
            sums[1] += kl.item()
        if world.lockstep is None:  # else the others are in this backward pass with us already
            control.check()
        unit_loss.backward()
        # Of the group's mean loss, without its importance weight.
        rectified = gradient.take() * count / int(mask.sum()) / unit.group.importance
        if sketch:
            share = count / int(used[row].sum()) / unit.group.importance
            sketches[row] += share * gradient.sketch.cpu().numpy()
        norms[unit.group.sde_step] += [(rectified / weight) ** 2, rectified**2, 1.0]
        sums += [unit_loss.item(), 0.0, float(cut[chosen].sum())]
        drift = max(drift, float(ratio[chosen].log().abs().max()))
        control.tick()
    world.rest()
    total = gradient.total(world)
    norms, sums = world.sum_array(norms), world.sum_array(sums)
    counts = world.sum_array(np.array([float(forwards), float(plain), float(reused)]))
    drifts = np.zeros(world.size)
    drifts[world.rank] = drift
    stats = GradientStats(
        loss=float(sums[0]),
        kl=float(sums[1]) / count,
        ratio_drift=float(world.sum_array(drifts).max()),
        clip_fraction=float(sums[2]) / count,
        by_step={
            k: {
                "raw": math.sqrt(norms[k, 0] / norms[k, 2]),
                "rectified": math.sqrt(norms[k, 1] / norms[k, 2]),
            }
            for k in range(len(norms))
            if norms[k, 2] > 0
        },
        forwards=int(counts[0]),
        plain_forwards=int(counts[1]),
        reused=int(counts[2]),
        # Rounded, so that the order of ranks does not reach the next draw.
        sketches=world.sum_array(sketches).astype(np.float32) if sketch else None,
    )
    return total, stats


def sampled_mean(step: Transition, rollout: Rollout) -> torch.Tensor:
    """Mean of the recorded step under the policy that took it, `[n, C, T, H, W]`.

    x' - s eps, with the noise drawn once more from its seeds: a rollout need not carry it.
    """
    group, shape = rollout.group, tuple(rollout.latents_next.shape[1:])
    noise = [normal(shape, step_seed(group, i, group.sde_step)) for i in rollout.samples]
    return rollout.latents_next - step.noise_std * torch.stack(noise).to(rollout.latents_next)


def update_units(
    sampler: RolloutSampler,
    groups: Sequence[PromptGroup],
    rollouts: Sequence[Rollout],
    used: np.ndarray,
    world: World,
) -> list[Unit]:
    """The backward passes of this rank, cut the same way for any number of ranks.

    Call it before the policy changes: with shared prefix it redraws what other ranks rolled out.
    """
    row_of = {group.group_id: row for row, group in enumerate(groups)}
    units = [
        Unit(row_of[r.group.group_id], r.group, r)
        for r in rollouts
        if not sampler.settings.shares(r.group)
    ]
    shared = [
        (row, g) for row, g in enumerate(groups) if sampler.settings.shares(g) and used[row].any()
    ]
    for row, group in world.deal(shared):
        mine = [r for r in rollouts if r.group.group_id == group.group_id]
        units.append(Unit(row, group, _whole_group(sampler, group, mine)))
    units += [Unit(row_of[t.group.group_id], t.group, t) for r in rollouts for t in r.later]
    # All of one expert, then all of the other: each is needed on the device once.
    order = [expert for expert, _ in sampler.stages]
    units.sort(key=lambda unit: order.index(sampler.expert(unit.group)))
    world.rest()
    return units


def _whole_group(sampler: RolloutSampler, group: PromptGroup, mine: Sequence[Rollout]) -> Rollout:
    """All samples of a group with shared prefix; parts of other ranks are redrawn from seeds."""
    mine = sorted(mine, key=lambda r: r.samples.start)
    if sum(len(r.samples) for r in mine) == group.size:
        return Rollout(
            group,
            range(group.size),
            mine[0].latents,
            torch.cat([r.latents_next for r in mine]),
            torch.cat([r.old_log_prob for r in mine]),
            torch.empty(0),
            velocity=mine[0].velocity,
        )
    return sampler.transition_of(group)


#: Steps whose median norm `optim.spike` multiplies, and how many of them it takes.
SPIKE_STEPS, SPIKE_LEAST = 16, 4


class PolicyOptimizer:
    """AdamW on the LoRA, with warm-up, gradient clipping and an exponential moving average.

    Args:
        policy: the policy whose LoRA is trained.
        config: optimizer settings.
        latent_elements: elements D of one video's latents; the default clip norm
            0.003 sqrt(2.1e6 / D) follows the gradient norm, which falls as 1 / sqrt(D).
        algorithm: `loss.algorithm`; `nft` has no default clip norm.

    That norm is a guard rail over all models and settings, often an order of magnitude above the
    gradients of one run. `optim.spike` cuts against the run's own: at a multiple of the median norm
    of its last steps.
    """

    def __init__(
        self, policy: Policy, config: OptimConfig, latent_elements: int, algorithm: str = "grpo"
    ) -> None:
        self.policy = policy
        self.config = config
        # DiffusionNFT regresses a velocity: its gradients are on another scale, and only a spike is cut.
        usual = math.inf if algorithm == "nft" else 0.003 * math.sqrt(2.1e6 / latent_elements)
        self.max_grad_norm = config.max_grad_norm or usual
        self.step_count = 0
        #: Norms before clipping of the last steps, per expert.
        self.norms: dict[str, list[float]] = {expert: [] for expert in policy.trained}
        self.parameters = policy.parameters()
        self.adam = Adam(self.parameters, config)
        self.ema = policy.snapshot()

    def learning_rate(self, step: int) -> float:
        """Learning rate of the 1-based optimizer step."""
        return self.config.learning_rate * min(1.0, step / max(self.config.warmup, 1))

    def step(self, gradient: Mapping[str, torch.Tensor]) -> float:
        """One AdamW step on float64 gradients; returns their norm before clipping.

        Raises:
            FlashGRPOError: the gradient is exactly zero everywhere.
        """
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        if norm == 0.0:
            raise FlashGRPOError(
                "the LoRA gradient is exactly zero: the attention backend has no backward pass or the "
                "LoRA is not active; use a differentiable attention (PyTorch's own)"
            )
        if not math.isfinite(norm):
            return norm
        scale = self._clip_factors(gradient)
        self.step_count += 1
        scaled = {name: g * scale[name] for name, g in gradient.items()}
        self.adam.step(scaled, self.learning_rate(self.step_count))
        decay = self.config.ema_decay
        for name, parameter in self.parameters.items():
            self.ema[name].lerp_(parameter.detach().to("cpu"), 1.0 - decay)
        return norm

    def _clip_factors(self, gradient: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Factor of each tensor that brings the gradient's norm down to the clip norm.

        Each expert has a norm of its own: their gradients differ by an order of magnitude, and a
        common one would let the larger silence the smaller.
        """
        factors: dict[str, float] = {}
        for expert in self.policy.trained:
            names = [n for n in gradient if not expert or n.startswith(f"{expert}.")]
            norm = math.sqrt(sum(float(gradient[n].square().sum()) for n in names))
            limit = self.clip_norm(expert)
            factors |= dict.fromkeys(names, min(1.0, limit / norm) if norm else 1.0)
            if norm:
                self.norms[expert] = [*self.norms[expert], norm][-SPIKE_STEPS:]
        return factors

    def clip_norm(self, expert: str = "") -> float:
        """The norm that an expert's next gradient is clipped to."""
        known = self.norms[expert]
        if self.config.spike == 0 or len(known) < SPIKE_LEAST:
            return self.max_grad_norm
        return min(self.max_grad_norm, self.config.spike * median(known))

    def state(self) -> dict[str, torch.Tensor]:
        """Adam's moments and the last norms as named tensors (CPU); the step count is kept beside."""
        norms = {
            f"norms.{expert}": torch.tensor(values, dtype=torch.float64)
            for expert, values in self.norms.items()
            if values
        }
        return self.adam.moments() | norms

    def load_state(self, tensors: Mapping[str, torch.Tensor], step_count: int) -> None:
        """Restore `state` and the number of steps taken."""
        self.adam.restore(tensors, step_count)
        for expert in self.norms:
            self.norms[expert] = tensors.get(f"norms.{expert}", torch.empty(0)).tolist()
        self.step_count = step_count
