"""What a run keeps on disk: its folder, checkpoints and log records."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import fence
from .advantage import Advantages
from .build import build_prompts
from .config import Config
from .config_io import config_hash, to_tables
from .distributed import World
from .errors import FlashGRPOError
from .groups import PromptGroup
from .runs.checkpoint import (
    clean_temporary,
    list_checkpoints,
    load_checkpoint,
    prune,
    save_checkpoint,
)
from .runs.events import read_events
from .runs.folder import RunFolder, free_name
from .runs.inputs import differences, inputs_of, read_inputs, write_inputs
from .scoring import Scores
from .update import GradientStats

if TYPE_CHECKING:
    from .trainer import Trainer

log = logging.getLogger(__name__)


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
    """Counters that survive a restart; everything random is derived from seeds instead.

    Attributes:
        iteration: iterations done.
        optimizer_steps: AdamW steps taken.
        forwards_total: transformer forwards of rollouts and updates, per video; a training forward
            and backward counts as 3.
        empty_iterations: iterations in a row without an optimizer step.
        best_iteration: iteration of the best validation reward; -1 before the first.
        best_reward: that reward.
        evaluations_without_gain: evaluations since then.
        judged: iteration of the last validation evaluation.
        baselines: rewards of the starting policy per split.
        advantage_stds: faded std of each reward term over past iterations (`loss.freeze_std`).
        prompt_position: prompts taken or passed over so far (`prompts.sampling = adaptive`).
        saturated: keys of the prompts whose last group had equal rewards (the same).
        kl_since: iteration since which `loss.kl_on_drop` counts; -1 is not yet.
    """

    iteration: int = 0
    optimizer_steps: int = 0
    forwards_total: int = 0
    empty_iterations: int = 0
    best_iteration: int = -1
    best_reward: float | None = None
    evaluations_without_gain: int = 0
    judged: int = 0
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    advantage_stds: dict[str, float] = field(default_factory=dict)
    prompt_position: int = 0
    saturated: list[str] = field(default_factory=list)
    kl_since: int = -1


def prepare_folder(
    folder: RunFolder, config: Config, resume: str, world: World | None = None
) -> None:
    """Create the run folder, or check that the existing one is the same run.

    Args:
        folder: where the run lives.
        config: its configuration.
        resume: `auto`, `never` (refuse an existing run) or `latest` (require one).
        world: the processes; only the main one writes.

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
    prompts = build_prompts(config)
    now = inputs_of(config, prompts)
    if exists:
        changed = differences(folder.config(), read_inputs(folder.path), config, now, prompts)
        # Without a checkpoint nothing was trained under this name, and it is free.
        if changed and list_checkpoints(folder.checkpoints):
            raise FlashGRPOError(
                f"run {folder.name!r} exists with other settings ({'; '.join(changed)}): use its settings, or "
                f"the free name {free_name(folder.output, folder.name)!r}"
            )
    world.barrier()
    if world.is_main:
        folder.write_config(config) if exists else folder.create(config)
        write_inputs(folder.path, now)
    world.barrier()


def open_trackers(trainer: Trainer) -> None:
    """Open what `run.trackers` names, on the main process.

    Raises:
        FlashGRPOError: it is not installed, or not part of this copy of the package.
    """
    config = trainer.config
    if not config.run.trackers or not trainer.world.is_main:
        return
    try:
        from .trackers import Trackers
    except ImportError:
        raise FlashGRPOError(
            "run.trackers needs the Python package: pip install 'flashgrpo[trackers]', or leave it "
            "empty; the same curves are in report.html"
        ) from None
    trainer.trackers = Trackers(
        config.run.trackers, trainer.folder.path, to_tables(config), trainer.state.iteration
    )


def finished_result(folder: RunFolder, config: Config) -> RunResult | None:
    """The result of a run that is finished on disk and asks for no more iterations, else None."""
    if folder.status() != "finished":
        return None
    events = read_events(folder.events)
    last = next(e for e in reversed(events) if e["event"] == "run_finished")
    loras = [folder.lora / name for name in last.get("lora") or []]
    if config.run.iterations > last.get("iterations", 0) or not all(p.is_file() for p in loras):
        return None
    tests = [e for e in events if e["event"] == "evaluation" and e.get("split") == "test"]
    return RunResult(
        "finished",
        folder.path,
        last["iteration"],
        last.get("best_iteration", last["iteration"]),
        loras,
        tests[-1] if tests else None,
        folder.report if folder.report.is_file() else None,
    )


#: Temporary names of `files` and `video`.
_LEFT_OVER = re.compile(r"\.tmp-\d+-[0-9a-f]+|\..+\.\d+\.tmp\.mp4")
#: Seconds after which a temporary file of the cache, which runs share, belongs to no one.
_STALE = 3600.0


def clean_left_overs(folder: RunFolder, cache: Path | None = None) -> None:
    """Remove what a process that was killed has left; only who trains the run may call it."""
    clean_temporary(folder.checkpoints)
    for place in (folder.path, folder.lora, folder.samples, *folder.samples.glob("*/")):
        _clean(place, 0.0)
    _clean(cache or folder.output / "flashgrpo" / "cache", _STALE)


def _clean(place: Path, age: float) -> None:
    for path in place.glob(".*"):
        try:
            old = age == 0 or time.time() - path.stat().st_mtime >= age
            if _LEFT_OVER.fullmatch(path.name) and old:
                fence.check(path)
                path.unlink()
        except OSError as exc:
            log.warning("left-over %s could not be removed: %s", path, exc)


def save(trainer: Trainer) -> None:
    """Write a checkpoint of the state after the current iteration."""
    digest = weights_hash(trainer)
    state, config = trainer.state, trainer.config
    if trainer.world.is_main:
        tensors = {
            "adapter": trainer.policy.snapshot(),
            "ema": trainer.optimizer.ema,
            "optimizer": trainer.optimizer.state(),
        }
        if trainer.best is not None:
            tensors["best"] = trainer.best
        if trainer.signals is not None:
            tensors["signals"] = trainer.signals.state()
        record = dict(vars(state)) | {"config": config_hash(config), "weights": digest}
        with trainer.phase("save", 1, state.iteration, stoppable=False):
            save_checkpoint(trainer.folder.checkpoints, state.iteration, tensors, record)
            prune(
                trainer.folder.checkpoints,
                config.run.keep,
                state.best_iteration,
                config.run.save_every,
            )
        trainer.event("checkpoint", state.iteration)
    trainer.world.barrier()
    trainer.saved = state.iteration


def restore(trainer: Trainer, path: Path) -> None:
    """Continue from a checkpoint."""
    tensors, state = load_checkpoint(path)
    trainer.policy.load(tensors["adapter"])
    trainer.optimizer.ema = {name: t.clone() for name, t in tensors["ema"].items()}
    trainer.optimizer.load_state(tensors.get("optimizer", {}), state["optimizer_steps"])
    trainer.best = tensors.get("best")
    if trainer.signals is not None:
        trainer.signals.load_state(tensors["signals"])
    state.setdefault("judged", state["iteration"])
    fresh = vars(RunState())  # what a checkpoint of an older version lacks
    trainer.state = RunState(**{name: state.get(name, fresh[name]) for name in fresh})
    trainer.saved = trainer.state.iteration


def same_start(trainer: Trainer) -> None:
    """Check that all processes continue from the same checkpoint.

    Raises:
        FlashGRPOError: some see another newest checkpoint than the main process.
    """
    found = trainer.world.gather([trainer.state.iteration])[:, 0].astype(int)
    other = np.flatnonzero(found != found[0])
    if len(other):
        raise FlashGRPOError(
            f"process {_listed(other)} sees the run at iteration {found[other[0]]}, process 0 at "
            f"{found[0]}: the output folder must be one that all machines share"
        )


def _listed(ranks: np.ndarray) -> str:
    return ", ".join(map(str, ranks))


def weights_hash(trainer: Trainer) -> str:
    """SHA-256 (hex) of the LoRA.

    Raises:
        FlashGRPOError: the processes do not agree; those that differ from process 0 are named.
    """
    digest = hashlib.sha256()
    for name, tensor in trainer.policy.snapshot().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    world = trainer.world
    if world.size > 1:
        # Six bytes fit a float64 exactly, so the hash travels in the same sum as everything else.
        raw = digest.digest()
        rows = world.gather([int.from_bytes(raw[i : i + 6], "big") for i in range(0, 30, 6)])
        other = np.flatnonzero((rows != rows[0]).any(axis=1))
        if len(other):
            raise FlashGRPOError(
                f"the LoRA of process {_listed(other)} differs from that of process 0 after "
                f"iteration {trainer.state.iteration}: use the same run.threads and library versions "
                "on all machines, then resume"
            )
    return digest.hexdigest()


def log_iteration(
    trainer: Trainer,
    iteration: int,
    groups: list[PromptGroup],
    scores: Scores,
    advantages: Advantages,
    stats: GradientStats | None,
    grad_norm: float,
    seconds: tuple[float, float],
) -> dict[str, Any]:
    """Append an iteration to `rewards.jsonl` and `events.jsonl`; returns the event.

    `seconds` are those of the clock and those of this process's processors.
    """
    stats = stats or GradientStats()
    valid = scores.valid
    if trainer.world.is_main:
        trainer.reward_log.append(iteration, _reward_rows(trainer, groups, scores, advantages))
    some = bool(valid.any())
    return trainer.event(
        "iteration",
        iteration,
        reward={
            "mean": float(scores.total[valid].mean()) if some else None,
            "std": float(scores.total[valid].std()) if some else None,
            "terms": {
                k: float(v[valid].mean()) if some else None
                for k, v in (scores.terms | scores.compared).items()
            },
        },
        masked=int((~valid).sum()),
        advantage_std=advantages.std,
        zero_variance_groups=int(advantages.zero_variance.sum()),
        groups=len(groups),
        loss=stats.loss,
        grad_norm=grad_norm,
        grad_norm_by_sigma={
            f"{trainer.schedule.sigmas[k]:.4f}": v for k, v in stats.by_step.items()
        },
        max_grad_norm=max(trainer.optimizer.clip_norm(name) for name in trainer.policy.trained),
        ratio_drift=stats.ratio_drift,
        clip_fraction=stats.clip_fraction,
        kl=stats.kl,
        lr=trainer.optimizer.learning_rate(max(trainer.optimizer.step_count, 1)),
        forwards_total=trainer.state.forwards_total,
        seconds=seconds[0],
        cpu_seconds=seconds[1],
        peak_memory=peak_memory(trainer.networks.device),
    )


def peak_memory(device: torch.device) -> int | None:
    """Largest memory in use so far in bytes: the GPU's, or the process's on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reward_rows(
    trainer: Trainer, groups: list[PromptGroup], scores: Scores, advantages: Advantages
) -> Iterator[dict[str, Any]]:
    for p, group in enumerate(groups):
        for s in range(group.size):
            step = next(iter(group.steps_of(s)), None)
            yield {
                "group_id": group.group_id,
                "prompt": group.prompt,
                "sample": s,
                "sde_step": step,
                "sigma": None if step is None else float(trainer.schedule.sigmas[step]),
                "total": float(scores.total[p, s]),
                "terms": {k: float(v[p, s]) for k, v in (scores.terms | scores.compared).items()},
                "advantage": float(advantages.values[p, s]),
                "valid": bool(scores.valid[p, s]),
            }
