"""The training loop: group, rollout, score, advantage, step.

`Trainer.iterate` is the whole method; everything else here is bookkeeping that makes a run
resumable, judged and exported.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import __version__
from .advantage import Advantages, compute_advantages
from .build import (
    Networks,
    build_eval_reward,
    build_prompts,
    build_reward,
    build_schedule,
    embed_prompts,
    load_networks,
    pick_device,
    rollout_settings,
    with_embedded_files,
)
from .config import Config
from .config_io import config_hash, identity_differences, sde_window, validate
from .control import Control
from .distributed import World
from .errors import Cancelled, FlashGRPOError
from .evaluation import EvalScores, evaluate, paired_interval
from .export import export_run_lora
from .groups import PromptGroup, choose_prompts, make_groups
from .prompts import Prompt
from .rollout import Rollout, RolloutSampler, rollout_forwards, sample_shares
from .runs.checkpoint import (
    clean_temporary,
    load_checkpoint,
    newest_checkpoint,
    prune,
    save_checkpoint,
)
from .runs.events import SCHEMA, EventLog, RewardLog
from .runs.folder import RunFolder, free_name
from .runs.report import write_report
from .scoring import Scores, score_rollouts
from .update import GradientStats, PolicyOptimizer, policy_gradient
from .video import write_mp4

log = logging.getLogger(__name__)

#: Iterations in a row that may pass without an optimizer step before the run stops with advice.
MAX_EMPTY = 5
#: Videos of an evaluation that are kept.
KEPT_VIDEOS = {"validation": 4, "test": 8}


@dataclass
class RunResult:
    """What a run ended with.

    Attributes:
        status: `finished`, or `stopped` when it was cancelled and can be resumed.
        folder: the run folder.
        iteration: iterations done.
        best_iteration: iteration whose weights were exported.
        loras: exported LoRA files.
        test: the final test event, or None without test prompts.
        report: the report page.
    """

    status: str
    folder: Path
    iteration: int
    best_iteration: int
    loras: list[Path]
    test: dict[str, Any] | None
    report: Path | None


@dataclass
class RunState:
    """Counters that survive a restart; everything random is derived from seeds instead."""

    iteration: int = 0
    optimizer_steps: int = 0
    forwards_total: int = 0
    empty_iterations: int = 0
    best_iteration: int = -1
    best_reward: float | None = None
    evaluations_without_gain: int = 0
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)


class Trainer:
    """A run in memory.

    Args:
        config: the complete configuration.
        networks: policy and VAE.
        folder: the run folder (created).
        control: the host.
        world: the processes.

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
        self.window = sde_window(config)
        self.settings = rollout_settings(config, *latent_layout(networks))
        self.prompts = build_prompts(config)
        self.reward = build_reward(config)
        self.eval_reward = build_eval_reward(config)
        self.state = RunState()
        self.best: dict[str, torch.Tensor] | None = None
        with self._phase("encode", 1):
            self.context = embed_prompts(
                config,
                self.prompts,
                cache or folder.output / "flashgrpo" / "cache",
                self.control,
                networks.device,
            )
        self.negative = (
            None if config.rollout.guidance == 1.0 else self.context(config.prompts.negative)
        )
        self.optimizer = PolicyOptimizer(
            self.policy, config.optim, math.prod(self.settings.latent_shape)
        )
        self.sampler = RolloutSampler(
            self.policy, self.schedule, self.settings, self.context, self.negative, self.control
        )

    # The five verbs.

    def iterate(self) -> dict[str, Any]:
        """One iteration: the method, top to bottom. Returns the logged metrics."""
        started = time.monotonic()
        iteration = self.state.iteration + 1
        groups = self.group(iteration)
        rollouts = self.rollout(groups, iteration)
        scores = self.score(groups, rollouts, iteration)
        advantages = self.advantage(scores)
        stats, grad_norm = self.step(groups, rollouts, advantages, iteration)
        self.state.iteration = iteration
        return self._record(
            iteration, groups, scores, advantages, stats, grad_norm, time.monotonic() - started
        )

    def group(self, iteration: int) -> list[PromptGroup]:
        """Choose the iteration's prompts and give each its SDE step and seeds."""
        config = self.config
        chosen = choose_prompts(
            config.rollout.prompts_per_iteration,
            len(self.prompts.train),
            iteration,
            config.run.seed,
        )
        picked = [self.prompts.train[i] for i in chosen]
        return make_groups(
            [p.text for p in picked],
            iteration=iteration,
            run_seed=config.run.seed,
            group_size=config.rollout.group_size,
            window=self.window,
            draw=config.schedule.draw,
            noise=config.rollout.noise,
            start_images=[p.image for p in picked],
        )

    def rollout(self, groups: list[PromptGroup], iteration: int) -> list[Rollout]:
        """Sample this rank's share of all videos."""
        shares = self.world.deal(sample_shares(groups, self.settings.micro_batch))
        self.control.bring(self.policy.transformer)
        self.sampler.forget()
        total = rollout_forwards(groups, self.schedule.steps, self.settings)
        with self._phase(
            "rollout", sum(len(samples) for _, samples in shares), iteration, forwards=total
        ):
            rollouts = [self.sampler.sample(groups[g], samples) for g, samples in shares]
        self.sampler.forget()
        self.state.forwards_total += total
        return rollouts

    def score(self, groups: list[PromptGroup], rollouts: list[Rollout], iteration: int) -> Scores:
        """Decode and score the videos."""
        self.control.bring(self.networks.vae)
        with self._phase("score", sum(len(r.samples) for r in rollouts), iteration):
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
        for rollout in rollouts:
            rollout.final = torch.empty(0)
        return scores

    def advantage(self, scores: Scores) -> Advantages:
        """Group-relative advantages."""
        loss = self.config.loss
        return compute_advantages(
            scores.terms,
            scores.weights,
            scores.valid,
            std=loss.advantage_std,
            clamp=loss.advantage_clamp,
            normalise=self.config.reward.normalise,
        )

    def step(
        self,
        groups: list[PromptGroup],
        rollouts: list[Rollout],
        advantages: Advantages,
        iteration: int,
    ) -> tuple[GradientStats | None, float]:
        """Policy-gradient step(s) on the recorded transitions; None when there is no signal."""
        if advantages.no_signal:
            self._empty(
                iteration,
                "no_signal",
                "all groups have equal rewards: nothing to learn from; "
                "raise the group size, use a finer reward, or choose prompts that are not solved yet",
            )
            return None, 0.0
        self.control.bring(self.policy.transformer)
        first: GradientStats | None = None
        norm = 0.0
        for _ in range(self.config.optim.updates_per_rollout):
            with self._phase("update", len(groups), iteration):
                gradient, stats = policy_gradient(
                    self.policy,
                    self.sampler,
                    groups,
                    rollouts,
                    advantages.values,
                    advantages.used,
                    self.config.loss,
                    self.window,
                    control=self.control,
                    world=self.world,
                )
                self.sampler.forget()
                norm = self.optimizer.step(gradient)
            self.state.forwards_total += 3 * stats.forwards
            first = first or stats
            if not math.isfinite(norm):
                self._empty(
                    iteration,
                    "not_finite",
                    "the gradient is not finite, the step was skipped: "
                    "lower optim.learning_rate or use dtype fp32 or bf16",
                )
                return first, norm
        assert first is not None
        if first.ratio_drift > self.config.loss.clip:
            self._warn(
                iteration,
                "ratio_drift",
                f"the ratio drifts by {first.ratio_drift:.2e} before the first "
                f"update, more than loss.clip = {self.config.loss.clip:g}: raise it to {5 * first.ratio_drift:.1e}",
            )
        self.state.empty_iterations = 0
        self.state.optimizer_steps = self.optimizer.step_count
        return first, norm

    # Evaluation and export.

    def evaluate(
        self, split: str, iteration: int, weights: dict[str, torch.Tensor] | None
    ) -> dict[str, Any]:
        """Judge weights (None = the live ones) on held-out prompts, against the starting policy."""
        e = self.config.eval
        held = (
            self.prompts.validation[: e.prompts]
            if split == "validation"
            else self.prompts.test[: e.test_prompts]
        )
        seeds = e.seeds if split == "validation" else e.test_seeds
        known = self.state.baselines.get(split)
        with self._phase("evaluate", len(held) * seeds * 2 * (1 if known else 2), iteration):
            if known is None:
                with self.policy.reference():
                    baseline = self._judge(split, held, seeds, 0)
                self.state.baselines[split] = baseline.to_json()
            else:
                baseline = EvalScores.from_json(known)
            if iteration == 0:
                scores = baseline
            else:
                with self.policy.using(weights):
                    scores = self._judge(split, held, seeds, iteration, baseline)
        difference, low, high = paired_interval(
            scores.total, baseline.total, seed=self.config.run.seed
        )
        return self._event(
            "evaluation",
            iteration,
            split=split,
            weights=e.weights,
            reward_mean=scores.mean,
            baseline_mean=baseline.mean,
            difference=difference,
            ci_low=low,
            ci_high=high,
            prompts=len(held),
            seeds=seeds,
            terms={k: float(np.nanmean(v)) for k, v in scores.terms.items()},
            sampler="ode",
            steps=self.schedule.steps,
            guidance=self.settings.guidance,
        )

    def _judge(
        self,
        split: str,
        held: list[Prompt],
        seeds: int,
        iteration: int,
        baseline: EvalScores | None = None,
    ) -> EvalScores:
        folder = "base" if iteration == 0 else f"{iteration:06d}"
        entries: list[dict[str, Any]] = []

        def keep(p: int, s: int, video: np.ndarray, reward: float) -> None:
            if s > 0 or p >= KEPT_VIDEOS[split]:
                return
            name = f"{split}_{p:03d}_{s}.mp4"
            write_mp4(self.folder.samples / folder / name, video, self.config.rollout.fps)
            if baseline is None:
                return
            self.control.preview(video, held[p].text)
            entries.append(
                {
                    "iteration": iteration,
                    "split": split,
                    "prompt": held[p].text,
                    "seed": s,
                    "file": f"{folder}/{name}",
                    "reward": reward,
                    "baseline_file": f"base/{name}",
                    "baseline_reward": float(baseline.total[p, s]),
                }
            )

        if self.world.is_main:
            (self.folder.samples / folder).mkdir(parents=True, exist_ok=True)
        scores = evaluate(
            self.policy,
            self.networks.vae,
            held,
            seeds,
            self.eval_reward,
            self.schedule,
            self.settings,
            self.context,
            self.negative,
            run_seed=self.config.run.seed,
            split=split,
            fps=self.config.rollout.fps,
            decode_batch=self.config.rollout.decode_batch,
            control=self.control,
            world=self.world,
            keep=keep if self.world.is_main else None,
        )
        if entries:
            self.folder.add_samples(entries)
        return scores

    def judged_weights(self) -> dict[str, torch.Tensor] | None:
        """The weights that evaluations judge: the EMA's, or None for the live ones."""
        if self.config.eval.weights == "ema" and self.config.optim.ema_decay > 0:
            return self.optimizer.ema
        return None

    def validate(self, iteration: int) -> bool:
        """Validation evaluation; keeps the best weights. True when patience has run out."""
        record = self.evaluate("validation", iteration, self.judged_weights())
        reward = record["reward_mean"]
        if reward is None:
            return False
        if self.state.best_reward is None or reward > self.state.best_reward:
            self.state.best_reward, self.state.best_iteration = reward, iteration
            self.state.evaluations_without_gain = 0
            weights = self.judged_weights()
            self.best = (
                self.policy.snapshot()
                if weights is None
                else {k: v.clone() for k, v in weights.items()}
            )
        else:
            self.state.evaluations_without_gain += 1
        patience = self.config.eval.patience
        return bool(patience and self.state.evaluations_without_gain >= patience)

    # Keeping the run on disk.

    def save(self) -> None:
        """Write a checkpoint of the state after the current iteration."""
        digest = self._weights_hash()
        if self.world.is_main:
            tensors = {
                "adapter": self.policy.snapshot(),
                "ema": self.optimizer.ema,
                "optimizer": self.optimizer.state(),
            }
            if self.best is not None:
                tensors["best"] = self.best
            state = dict(vars(self.state)) | {"config": config_hash(self.config), "weights": digest}
            with self._phase("save", 1, self.state.iteration):
                save_checkpoint(self.folder.checkpoints, self.state.iteration, tensors, state)
                prune(
                    self.folder.checkpoints,
                    self.config.run.keep,
                    self.state.best_iteration,
                    self.config.run.save_every,
                )
            self._event("checkpoint", self.state.iteration)
        self.world.barrier()

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint."""
        tensors, state = load_checkpoint(path)
        self.policy.load(tensors["adapter"])
        self.optimizer.ema = {name: t.clone() for name, t in tensors["ema"].items()}
        self.optimizer.load_state(tensors.get("optimizer", {}), state["optimizer_steps"])
        self.best = tensors.get("best")
        self.state = RunState(**{k: state[k] for k in vars(RunState())})

    def _weights_hash(self) -> str:
        """SHA-256 of the LoRA; all ranks must agree."""
        digest = hashlib.sha256()
        for name, tensor in self.policy.snapshot().items():
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
        if self.world.size > 1:
            own = np.zeros((self.world.size, 4))
            own[self.world.rank] = [
                int.from_bytes(digest.digest()[i : i + 6], "big") for i in range(0, 24, 6)
            ]
            rows = self.world.sum_array(own)
            if not (rows == rows[0]).all():
                raise FlashGRPOError(
                    f"the LoRA differs between processes after iteration {self.state.iteration}: use the same "
                    "run.threads and library versions on all machines, then resume"
                )
        return digest.hexdigest()

    def _record(
        self,
        iteration: int,
        groups: list[PromptGroup],
        scores: Scores,
        advantages: Advantages,
        stats: GradientStats | None,
        grad_norm: float,
        seconds: float,
    ) -> dict[str, Any]:
        valid = scores.valid
        stats = stats or GradientStats()
        self.reward_log.append(
            iteration, self._reward_rows(groups, scores, advantages)
        ) if self.world.is_main else None
        return self._event(
            "iteration",
            iteration,
            reward={
                "mean": float(scores.total[valid].mean()) if valid.any() else None,
                "std": float(scores.total[valid].std()) if valid.any() else None,
                "terms": {
                    k: float(v[valid].mean()) if valid.any() else None
                    for k, v in scores.terms.items()
                },
            },
            masked=int((~valid).sum()),
            advantage_std=advantages.std,
            zero_variance_groups=int(advantages.zero_variance.sum()),
            groups=len(groups),
            loss=stats.loss,
            grad_norm=grad_norm,
            grad_norm_by_sigma={
                f"{self.schedule.sigmas[k]:.4f}": v for k, v in stats.by_step.items()
            },
            max_grad_norm=self.optimizer.max_grad_norm,
            ratio_drift=stats.ratio_drift,
            clip_fraction=stats.clip_fraction,
            kl=stats.kl,
            lr=self.optimizer.learning_rate(max(self.optimizer.step_count, 1)),
            forwards_total=self.state.forwards_total,
            seconds=seconds,
        )

    def _reward_rows(
        self, groups: list[PromptGroup], scores: Scores, advantages: Advantages
    ) -> Iterator[dict[str, Any]]:
        for p, group in enumerate(groups):
            for s in range(group.size):
                yield {
                    "group_id": group.group_id,
                    "prompt": group.prompt,
                    "sample": s,
                    "sde_step": group.sde_step,
                    "sigma": float(self.schedule.sigmas[group.sde_step]),
                    "total": float(scores.total[p, s]),
                    "terms": {k: float(v[p, s]) for k, v in scores.terms.items()},
                    "advantage": float(advantages.values[p, s]),
                    "valid": bool(scores.valid[p, s]),
                }

    def _event(self, kind: str, iteration: int, **fields: Any) -> dict[str, Any]:
        if not self.world.is_main:
            return {"event": kind, "iteration": iteration, **fields}
        record = self.events.append(kind, iteration, **fields)
        self.control.event(record)
        return record

    def _warn(self, iteration: int, code: str, message: str) -> None:
        log.warning("%s", message)
        self._event("warning", iteration, code=code, message=message)

    def _empty(self, iteration: int, code: str, message: str) -> None:
        self._warn(iteration, code, message)
        self.state.empty_iterations += 1
        if self.state.empty_iterations >= MAX_EMPTY:
            raise FlashGRPOError(f"{MAX_EMPTY} iterations in a row without an update ({message})")

    @contextmanager
    def _phase(self, name: str, total: int, iteration: int = 0, **counters: Any) -> Iterator[None]:
        self.control.phase(name, total, iteration)
        self.control.check()
        started = time.monotonic()
        yield
        self._event("phase", iteration, name=name, seconds=time.monotonic() - started, **counters)


def latent_layout(networks: Networks) -> tuple[int, int]:
    """Latent channels of the transformer and pixels per latent of the VAE."""
    return networks.spec.out_channels, getattr(
        networks.vae.config, "scale_factor_spatial", None
    ) or 8


def train(
    config: Config,
    control: Control | None = None,
    *,
    world: World | None = None,
    networks: Networks | None = None,
    cache: Path | None = None,
    resume: str = "auto",
) -> RunResult:
    """Train, or go on training, a run to its end.

    Args:
        config: the configuration; `run.output` and `run.name` decide the folder.
        control: the host.
        world: the processes; None is a single one.
        networks: already loaded networks (ComfyUI keeps a pool); None loads them.
        cache: folder of the prompt embeddings; default `<output>/flashgrpo/cache`.
        resume: `auto` continues an unfinished run and extends a finished one, `never` refuses an
            existing run, `latest` requires one.

    Returns:
        The result; with status `stopped` when the host cancelled through `Cancelled`.

    Raises:
        FlashGRPOError: see the message; the run folder stays resumable.
    """
    control, world = control or Control(), world or World()
    validate(config)
    if config.run.processes and config.run.processes != world.size:
        raise FlashGRPOError(
            f"run.processes = {config.run.processes} but {world.size} process(es) run: start with "
            f"torchrun --nproc_per_node {config.run.processes}, or set run.processes = 0"
        )
    folder = RunFolder(config.run.output, config.run.name)
    prepare_folder(folder, config, resume, world)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    with folder.lock() if world.is_main else _nothing():
        config = with_embedded_files(config)
        networks = networks or load_networks(
            config, pick_device(config.model.device) if world.size == 1 else world.device
        )
        trainer = Trainer(config, networks, folder, control=control, world=world, cache=cache)
        return run(trainer)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def prepare_folder(
    folder: RunFolder, config: Config, resume: str, world: World | None = None
) -> None:
    """Create the run folder, or check that the existing one is the same run.

    Raises:
        FlashGRPOError: the run exists with other settings (they are listed), or `resume` forbids.
    """
    world = world or World()
    exists = folder.exists()
    if exists and resume == "never":
        raise FlashGRPOError(
            f"run {folder.name!r} exists already: choose another name, e.g. {free_name(folder.output, folder.name)!r}"
        )
    if not exists and resume == "latest":
        raise FlashGRPOError(
            f"run {folder.name!r} does not exist in {str(folder.path.parent)!r}: nothing to resume"
        )
    if exists:
        changed = identity_differences(folder.config(), config)
        if changed:
            raise FlashGRPOError(
                f"run {folder.name!r} exists with other settings ({'; '.join(changed)}): use its settings, or "
                f"the free name {free_name(folder.output, folder.name)!r}"
            )
    if world.is_main:
        folder.write_config(config) if exists else folder.create(config)
    world.barrier()


def run(trainer: Trainer) -> RunResult:
    """Run a trainer to the end: resume, iterate, evaluate, export, report."""
    config, folder, world = trainer.config, trainer.folder, trainer.world
    resumed = None
    if world.is_main:
        clean_temporary(folder.checkpoints)
    world.barrier()
    newest = newest_checkpoint(
        folder.checkpoints,
        lambda path, reason: trainer._warn(
            0,
            "checkpoint_corrupt",
            f"checkpoint {path.name} is damaged ({reason}): the one before it is used",
        ),
    )
    if newest is not None:
        trainer.restore(newest)
        resumed = trainer.state.iteration
    trainer._event(
        "run_started",
        trainer.state.iteration,
        schema=SCHEMA,
        versions={"flashgrpo": __version__, "torch": torch.__version__},
        device=str(trainer.networks.device),
        world_size=world.size,
        resumed_from=resumed,
        shift=trainer.schedule.shift,
        sigmas=[round(float(s), 6) for s in trainer.schedule.sigmas],
        window=list(trainer.window),
        lora={
            "modules": len(trainer.policy.targets),
            "parameters": sum(p.numel() for p in trainer.policy.parameters().values()),
            "rank": trainer.policy.rank,
            "alpha": trainer.policy.alpha,
        },
        prompts={
            "train": len(trainer.prompts.train),
            "validation": len(trainer.prompts.validation),
            "test": len(trainer.prompts.test),
        },
        config_hash=config_hash(config),
    )
    try:
        return _loop(trainer)
    except Cancelled:
        trainer._event("run_finished", trainer.state.iteration, status="stopped", lora=None)
        return RunResult(
            "stopped",
            folder.path,
            trainer.state.iteration,
            trainer.state.best_iteration,
            [],
            None,
            None,
        )
    except Exception as exc:
        if world.is_main and isinstance(exc, FlashGRPOError):
            trainer._event(
                "run_finished", trainer.state.iteration, status="failed", lora=None, reason=str(exc)
            )
        raise


def _loop(trainer: Trainer) -> RunResult:
    config, state, folder, world = trainer.config, trainer.state, trainer.folder, trainer.world
    every = config.eval.every
    judge = bool(every and trainer.prompts.validation)
    stop_early = False
    if state.iteration == 0 and judge and "validation" not in state.baselines:
        trainer.validate(0)
    while state.iteration < config.run.iterations and not stop_early:
        trainer.iterate()
        if judge and (state.iteration % every == 0 or state.iteration == config.run.iterations):
            stop_early = trainer.validate(state.iteration)
        trainer.save()
    weights, iteration = chosen_weights(trainer)
    test = None
    if trainer.prompts.test and config.eval.test_prompts:
        test = trainer.evaluate("test", iteration, weights)
    loras: list[Path] = []
    report = None
    if world.is_main:
        loras = [export_run_lora(trainer, weights, iteration)]
        trainer._event(
            "run_finished",
            state.iteration,
            status="finished",
            lora=[p.name for p in loras],
            best_iteration=iteration,
        )
        report = write_report(folder.path)
    world.barrier()
    return RunResult("finished", folder.path, state.iteration, iteration, loras, test, report)


def chosen_weights(trainer: Trainer) -> tuple[dict[str, torch.Tensor], int]:
    """The weights to test and export: the best on validation, else the newest."""
    if trainer.best is not None and trainer.state.best_iteration > 0:
        return trainer.best, trainer.state.best_iteration
    weights = trainer.judged_weights()
    return (trainer.policy.snapshot() if weights is None else weights), trainer.state.iteration
