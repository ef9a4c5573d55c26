"""The training loop: group, rollout, score, advantage, step.

`Trainer.iterate` is the whole method; what a run keeps on disk is in `keeping.py`, how it is
judged in `judging.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .advantage import Advantages, check_masked, compute_advantages, faded_stds
from .build import (
    Networks,
    build_eval_reward,
    build_prompts,
    build_reward,
    build_schedule,
    embed_prompts,
    given_embeddings,
    latent_layout,
    needed_prompts,
    rollout_settings,
    start_images,
)
from .choosing import iteration_groups, unsaturated_prompts
from .config import Config
from .control import Control
from .distributed import World
from .errors import NoUpdate
from .forwards import rollout_forwards, share_cost
from .groups import PromptGroup
from .health import Health
from .keeping import (
    RunState,
    log_iteration,
)
from .nft import nft_gradient, noised_units
from .overlap import ScoringThread, Timeline, decode, obstacle
from .rollout import Rollout, RolloutSampler, sample_shares
from .runs.events import EventLog, RewardLog, read_events
from .runs.folder import RunFolder
from .scoring import Scores, gather_scores, score_rollouts
from .signals import StepSignals
from .update import GradientStats, PolicyOptimizer, policy_gradient, update_units
from .windows import sde_windows

log = logging.getLogger(__name__)

#: Iterations in a row that may pass without an optimizer step before the run stops with advice.
MAX_EMPTY = 5


class Trainer:
    """A run in memory.

    Args:
        config: the complete configuration.
        networks: policy and VAE.
        folder: the run folder (created).
        control: the host.
        world: the processes.
        cache: folder of the prompt embeddings.
        embeddings: ready embeddings, see `train`.

    Raises:
        FlashGRPOError: prompts, reward or text encoder do not fit.
    """

    def __init__(
        self,
        config: Config,
        networks: Networks,
        folder: RunFolder,
        *,
        control: Control | None = None,
        world: World | None = None,
        cache: Path | None = None,
        embeddings: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.config = config
        self.networks = networks
        self.policy = networks.policy
        self.folder = folder
        self.control = control or Control()
        self.world = world or World()
        self.events = EventLog(folder.events)
        self.reward_log = RewardLog(folder.rewards)
        self.schedule = build_schedule(config)
        self.windows = sde_windows(config)
        self.settings = rollout_settings(config, *latent_layout(networks))
        self.prompts = build_prompts(config)
        shared, terms = config, (*config.reward.terms, *config.eval.terms)
        if self.world.local_size > 1 and any(t.get("once_per_node") for t in terms):
            # Network code: not in the registry's archive, where there is one process only.
            shared = import_module(".served.shared", __package__).share(config, self.world)
        self.reward = build_reward(shared)
        self.eval_reward = build_eval_reward(shared)
        self.health = Health(self.reward.weights, read_events(folder.events))
        self.state = RunState()
        self.signals = StepSignals(self.schedule.steps) if config.schedule.adaptive else None
        self.trackers: Any = None  # the package's `Trackers`, which the node pack comes without
        self.saved = 0  # iteration of the last checkpoint
        self.best: dict[str, torch.Tensor] | None = None
        cache = cache or folder.output / "flashgrpo" / "cache"
        if embeddings is not None:
            self.context = given_embeddings(config, self.prompts, embeddings)
        else:
            with self.phase("encode", 1):
                # The first process of a machine encodes, the others find it in the cache.
                with self.world.one_at_a_time():
                    self.context = embed_prompts(
                        config, self.prompts, cache, self.control, networks.device
                    )
        with self.world.one_at_a_time():
            self.images = start_images(
                config, networks, needed_prompts(config, self.prompts), cache, self.control
            )
        self.negative = self.context(config.prompts.negative) if self.settings.guided else None
        self.optimizer = PolicyOptimizer(
            self.policy,
            config.optim,
            math.prod(self.settings.latent_shape),
            config.loss.algorithm,
        )
        self.sampler = RolloutSampler(
            self.policy,
            self.schedule,
            self.settings,
            self.context,
            self.negative,
            self.control,
            self.images,
            self._graphs(),
        )
        self.overlaps = config.reward.overlap
        reason = obstacle(self.reward.rewards, self.control, config.model.offload)
        if self.overlaps and reason is not None:
            self.overlaps = False
            self.warn(0, "no_overlap", f"scoring does not overlap sampling: {reason}")

    @property
    def window(self) -> tuple[int, int]:
        """From the first step that may be stochastic to behind the last, over all experts."""
        ends = list(self.windows.values())
        return min(first for first, _ in ends), max(end for _, end in ends)

    def _graphs(self) -> float:
        """GiB for kept graphs: none where weights move or are swapped before the update."""
        model = self.config.model
        moves = model.offload or self.control.device is not None or self.world.lockstep is not None
        continued = model.continue_from or model.continue_from_low  # its reference swaps in place
        return 0.0 if moves or continued else self.config.rollout.keep_graph

    # The five verbs.

    def iterate(self) -> dict[str, Any]:
        """One iteration: the method, top to bottom. Returns the logged metrics."""
        started, worked = time.monotonic(), time.process_time()
        iteration = self.state.iteration + 1
        groups = self.group(iteration)
        if self.overlaps:
            rollouts, scores = self.rollout_and_score(groups, iteration)
        else:
            rollouts = self.rollout(groups, iteration)
            scores = self.score(groups, rollouts, iteration)
        advantages = self.advantage(scores)
        self.note_saturated(groups, advantages)
        stats, grad_norm = self.step(groups, rollouts, advantages, iteration)
        self.state.iteration = iteration
        seconds = (time.monotonic() - started, time.process_time() - worked)
        return log_iteration(self, iteration, groups, scores, advantages, stats, grad_norm, seconds)

    def group(self, iteration: int) -> list[PromptGroup]:
        """Choose the iteration's prompts and give each its SDE step and seeds."""
        state, chosen = self.state, None
        if self.config.prompts.sampling == "adaptive":
            chosen, state.prompt_position = unsaturated_prompts(
                self.prompts.train,
                self.config.rollout.prompts_per_iteration,
                state.prompt_position,
                set(state.saturated),
                self.config.run.seed,
            )
        return iteration_groups(
            self.config, self.prompts, iteration, chosen=chosen, signals=self.signals
        )

    def rollout(
        self,
        groups: list[PromptGroup],
        iteration: int,
        done: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Sample this rank's share of all videos; `done` is called with each as it is finished."""
        shares = self.world.deal(
            sample_shares(groups, self.settings.micro_batch),
            share_cost(groups, self.schedule.steps, self.settings),
        )
        self.sampler.forget()
        total = rollout_forwards(groups, self.schedule, self.settings, self.sampler.stages)
        with self.phase(
            "rollout", sum(len(samples) for _, samples in shares), iteration, forwards=total
        ):
            rollouts = []
            for rollout in self.sampler.sample_all(groups, shares):
                rollouts.append(rollout)
                if done is not None:
                    done(rollout)
            self.world.rest()
        self.sampler.forget()
        self.state.forwards_total += total
        return rollouts

    def score(self, groups: list[PromptGroup], rollouts: list[Rollout], iteration: int) -> Scores:
        """Decode and score the videos."""
        self.control.bring(self.networks.vae)
        with self.phase("score", sum(len(r.samples) for r in rollouts), iteration):
            scores = score_rollouts(
                self.networks.vae,
                groups,
                rollouts,
                self.reward,
                fps=self.config.rollout.fps,
                decode_batch=self.config.rollout.decode_batch,
                control=self.control,
                world=self.world,
            )
        self._drop_videos(rollouts)
        return scores

    def rollout_and_score(
        self, groups: list[PromptGroup], iteration: int
    ) -> tuple[list[Rollout], Scores]:
        """Both verbs at once: each micro-batch is scored in a thread while the next is sampled."""
        r, vae, timeline = self.config.rollout, self.networks.vae, Timeline()
        frames = self.reward.frames_needed(r.frames)
        with ScoringThread(self.reward, timeline) as scoring:

            def hand_over(rollout: Rollout) -> None:
                timeline.sampled()
                self.control.bring(vae)
                with timeline.span("decode"):
                    batch = decode(vae, rollout, r.fps, r.decode_batch, self.control, frames)
                with timeline.span("wait"):
                    scoring.put(batch, self.control)
                self.control.bring(self.sampler.stages[-1][0].transformer)
                timeline.sampling()

            rollouts = self.rollout(groups, iteration, hand_over)
            with self.phase("score", scoring.left, iteration), timeline.span("wait"):
                measured = scoring.finish(len(rollouts), self.control)
        pieces = list(zip(rollouts, measured, strict=True))
        scores = gather_scores(groups, pieces, self.reward, self.world)
        self._drop_videos(rollouts)
        self.event("timeline", iteration, **timeline.record())
        return rollouts, scores

    def _drop_videos(self, rollouts: list[Rollout]) -> None:
        if self.config.loss.algorithm == "grpo":  # its update needs the transitions only
            for rollout in rollouts:
                rollout.final = torch.empty(0)

    def advantage(self, scores: Scores) -> Advantages:
        """Group-relative advantages; stops when too many scores have failed."""
        check_masked(scores.valid)
        loss, state = self.config.loss, self.state
        found = compute_advantages(
            scores.terms,
            scores.weights,
            scores.valid,
            std=loss.advantage_std,
            clamp=loss.advantage_clamp,
            normalise=self.config.reward.normalise,
            frozen=state.advantage_stds if loss.freeze_std else None,
        )
        if loss.freeze_std:
            state.advantage_stds = faded_stds(state.advantage_stds, found.stds)
        return found

    def note_saturated(self, groups: list[PromptGroup], advantages: Advantages) -> None:
        """Remember the prompts whose videos were all alike, for `prompts.sampling = adaptive`."""
        if self.config.prompts.sampling == "adaptive":
            keys = [group.group_id.rpartition("-")[0] for group in groups]
            alike = {k for k, flat in zip(keys, advantages.zero_variance, strict=True) if flat}
            self.state.saturated = sorted((set(self.state.saturated) - set(keys)) | alike)

    def step(
        self,
        groups: list[PromptGroup],
        rollouts: list[Rollout],
        advantages: Advantages,
        iteration: int,
    ) -> tuple[GradientStats | None, float]:
        """Policy-gradient steps on the recorded transitions; None when there is no signal."""
        if advantages.no_signal:
            self._empty(
                iteration,
                "no_signal",
                "all groups have equal rewards: nothing to learn from; "
                "raise the group size, use a finer reward, or choose prompts that are not solved yet",
            )
            return None, 0.0
        gradient_of, passes = self._update(groups, rollouts, advantages, iteration)
        first: GradientStats | None = None
        norm = 0.0
        for _ in range(self.config.optim.updates_per_rollout):
            with self.phase("update", passes, iteration):
                gradient, stats = gradient_of()
                # All videos that teach something are outside the clip range: nothing is left to do.
                cut = stats.clip_fraction > 0 and not any(bool(g.any()) for g in gradient.values())
                if not cut:
                    norm = self.optimizer.step(gradient)
            self.sampler.forget()
            self.state.forwards_total += 3 * stats.forwards + stats.plain_forwards - stats.reused
            self.state.optimizer_steps = self.optimizer.step_count
            first = first or stats
            first.clip_fraction = stats.clip_fraction
            if cut:
                break
            if not math.isfinite(norm):
                self._empty(
                    iteration,
                    "not_finite",
                    "the gradient is not finite, the step was skipped: "
                    "lower optim.learning_rate or use dtype fp32 or bf16",
                )
                return first, norm
        if self.signals is not None and first is not None and first.sketches is not None:
            rows = np.flatnonzero(advantages.used.any(axis=1)).tolist()
            self.signals.add([groups[row].sde_step for row in rows], first.sketches[rows])
        drift, clip = (first or GradientStats()).ratio_drift, self.config.loss.clip
        if drift > clip and self.config.loss.mask == "clip":
            self.warn(
                iteration,
                "ratio_drift",
                f"the ratio drifts by {drift:.2e} before the first update, more than loss.clip = "
                f"{clip:g}: raise it to {5 * drift:.1e}",
            )
        if norm == 0.0:
            self._empty(
                iteration,
                "all_clipped",
                "the clip range cuts every video before the first update, so nothing was learnt: "
                "raise loss.clip above the ratio drift",
            )
            return first, norm
        self.state.empty_iterations = 0
        return first, norm

    def _update(
        self,
        groups: list[PromptGroup],
        rollouts: list[Rollout],
        advantages: Advantages,
        iteration: int,
    ) -> tuple[Callable[[], tuple[dict[str, torch.Tensor], GradientStats]], int]:
        """What computes the gradient under the present weights, and its number of backward passes."""
        policy, sampler, world, loss = self.policy, self.sampler, self.world, self.config.loss
        if self.state.kl_since >= 0:
            loss = replace(loss, kl=loss.kl_on_drop)
        values, used, both = advantages.values, advantages.used, {"control": self.control}
        if loss.algorithm == "nft":
            seed = self.config.run.seed
            noised = noised_units(sampler, groups, rollouts, loss.nft_levels, seed, iteration)
            return lambda: nft_gradient(
                policy, sampler, noised, values, used, loss, world=world, **both
            ), len(noised)
        units = update_units(sampler, groups, rollouts, used, world)
        windows = list(self.windows.values())
        return lambda: policy_gradient(
            policy,
            sampler,
            groups,
            units,
            values,
            used,
            loss,
            windows,
            world=world,
            sketch=self.signals is not None,
            **both,
        ), len(units)

    # Telling the host and the run folder.

    def event(self, kind: str, iteration: int, **fields: Any) -> dict[str, Any]:
        """Append a record to `events.jsonl` (main process) and show it to the host."""
        if not self.world.is_main:
            return {"event": kind, "iteration": iteration, **fields}
        record = self.events.append(kind, iteration, **fields)
        self.control.event(record)
        if self.trackers is not None:
            self.trackers.log(record)
        for sign in self.health.observe(record):
            self.warn(iteration, sign.code, sign.message)
        return record

    def warn(self, iteration: int, code: str, message: str) -> None:
        """Log and record a warning in plain words."""
        log.warning("%s", message)
        self.event("warning", iteration, code=code, message=message)

    def _empty(self, iteration: int, code: str, message: str) -> None:
        self.warn(iteration, code, message)
        self.state.empty_iterations += 1
        if self.state.empty_iterations >= MAX_EMPTY:
            raise NoUpdate(f"{MAX_EMPTY} iterations in a row without an update ({message})")

    @contextmanager
    def phase(
        self, name: str, total: int, iteration: int = 0, *, stoppable: bool = True, **counters: Any
    ) -> Iterator[None]:
        """Announce a phase of `total` ticks to the host and record how long it took."""
        self.control.phase(name, total, iteration)
        if stoppable:
            self.control.check()
        started = time.monotonic()
        yield
        self.event("phase", iteration, name=name, seconds=time.monotonic() - started, **counters)
