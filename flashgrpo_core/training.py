"""A run from its start to its end: locks, resume, iterations, evaluations, export, report.

What one iteration does is in `trainer.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from . import __version__, fence
from .build import Networks, load_networks, preflight
from .config import Config
from .config_io import config_hash, validate
from .control import Control
from .devices import pick_device
from .distributed import World
from .errors import Cancelled, FlashGRPOError
from .export import export_run_loras
from .failures import failed
from .judging import chosen_weights, judge, latest_weights, out_of_patience, validate_run
from .keeping import (
    RunResult,
    clean_left_overs,
    finished_result,
    open_trackers,
    prepare_folder,
    restore,
    same_start,
    save,
)
from .memory_fit import check_memory
from .runs.checkpoint import list_checkpoints, newest_checkpoint
from .runs.events import SCHEMA
from .runs.folder import RunFolder
from .runs.report import write_report
from .sharding import load_sharded
from .trainer import Trainer
from .watchdog import Watchdog


def train(
    config: Config,
    control: Control | None = None,
    *,
    world: World | None = None,
    networks: Networks | None = None,
    cache: Path | None = None,
    embeddings: Mapping[str, torch.Tensor] | None = None,
    resume: str = "auto",
) -> RunResult:
    """Train, or go on training, a run to its end.

    Args:
        config: the configuration; `run.output` and `run.name` decide the folder.
        control: the host.
        world: the processes; None is a single one.
        networks: already loaded networks (ComfyUI keeps a pool); None loads them.
        cache: folder of the prompt embeddings; default `<output>/flashgrpo/cache`.
        embeddings: prompt -> embedding `[tokens, 4096]` that a host has encoded itself, the
            negative prompt included; None encodes with `model.text_encoder`.
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
    fresh = not folder.exists()
    tight: list[str] = []  # what the memory check warns of, for the run's events
    try:
        if fresh:
            preflight(config, files=networks is None)
            if networks is None:
                check_memory(
                    config, _device(config, world), processes=world.size, warn=tight.append
                )
        world.barrier()
        prepare_folder(folder, config, resume, world)
        done = finished_result(folder, config)
        if done is not None:
            return done
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        locked = folder.lock() if world.is_main else nullcontext()
        with (
            locked,
            world.watching_peers(),
            Watchdog(control, world, config.run.stall) as watchdog,
        ):
            if networks is None and config.model.shard and world.size > 1:
                networks = load_sharded(config, world)
            networks = networks or load_networks(config, _device(config, world))
            trainer = Trainer(
                config,
                networks,
                folder,
                control=watchdog,
                world=world,
                cache=cache,
                embeddings=embeddings,
            )
            watchdog.warn = trainer.warn
            for message in tight if world.is_main else ():
                trainer.warn(0, "memory", message)
            return run(trainer)
    except Cancelled:
        # Asked to stop before the first iteration, while prompts were encoded.
        world.leave()
        return RunResult("stopped", folder.path, 0, -1, [], None, None)
    except Exception as exc:
        world.leave(failed=True)
        trained = bool(list_checkpoints(folder.checkpoints))
        if isinstance(exc, FlashGRPOError) and fresh and world.is_main and not trained:
            # Nothing was trained: a name must not be taken by a mistake.
            fence.check(folder.path)
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    finally:
        world.lockstep = None


def _device(config: Config, world: World) -> torch.device:
    """Where this process loads its networks."""
    return pick_device(config.model.device) if world.size == 1 else world.device


def run(trainer: Trainer) -> RunResult:
    """Run a trainer to the end: resume, iterate, evaluate, export, report."""
    config, folder, world = trainer.config, trainer.folder, trainer.world
    resumed = None
    if world.is_main:
        clean_left_overs(folder)
    world.barrier()
    newest = newest_checkpoint(
        folder.checkpoints,
        lambda path, reason: trainer.warn(
            0,
            "checkpoint_corrupt",
            f"checkpoint {path.name} is damaged ({reason}): the one before it is used",
        ),
    )
    if newest is None and list_checkpoints(folder.checkpoints):
        trainer.warn(0, "no_checkpoint", "no checkpoint is intact: the run begins again")
    if newest is not None:
        restore(trainer, newest)
        resumed = trainer.state.iteration
    same_start(trainer)
    open_trackers(trainer)
    trainer.event(
        "run_started",
        trainer.state.iteration,
        schema=SCHEMA,
        versions={"flashgrpo": __version__, "torch": torch.__version__},
        device=str(trainer.networks.device),
        world_size=world.size,
        sharded=world.lockstep is not None,
        resumed_from=resumed,
        shift=trainer.schedule.shift,
        sigmas=[round(float(s), 6) for s in trainer.schedule.sigmas],
        window=list(trainer.window),
        **({"windows": trainer.windows} if len(trainer.policy.experts) > 1 else {}),
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
        with world.watching_peers():
            return _loop(trainer)
    except Cancelled:
        world.leave()
        saved = trainer.saved
        trainer.event("run_finished", saved, status="stopped", lora=None)
        best = trainer.state.best_iteration
        return RunResult("stopped", folder.path, saved, min(best, saved), [], None, None)
    except Exception as exc:
        failure = failed(trainer, exc)
        if failure is exc:
            raise
        raise failure from exc
    finally:
        if trainer.trackers is not None:
            trainer.trackers.close()


def _finish_iteration(trainer: Trainer, judged: bool) -> None:
    """Evaluate when it is due, and save: what was trained is kept even when that is stopped."""
    state = trainer.state
    if judged:
        try:
            validate_run(trainer, state.iteration)
        except Cancelled:
            trainer.world.leave()
            save(trainer)
            raise
        state.judged = state.iteration
    save(trainer)
    # A cancel during the last save stops the run too, before it is judged and exported.
    trainer.control.check()
    if judged and trainer.world.is_main:
        # A night that is cancelled later still leaves a LoRA that can be used.
        exported = export_run_loras(trainer, latest_weights(trainer), state.iteration)
        for expert, path in exported.items():
            tag = {"expert": expert} if expert else {}
            trainer.event("lora", state.iteration, file=path.name, **tag)


def _loop(trainer: Trainer) -> RunResult:
    config, state, folder, world = trainer.config, trainer.state, trainer.folder, trainer.world
    every = config.eval.every if trainer.prompts.validation else 0
    if every and "validation" not in state.baselines:
        validate_run(trainer, 0)
    due = bool(every) and (state.iteration % every == 0 or state.iteration == config.run.iterations)
    if due and state.judged < state.iteration:
        _finish_iteration(trainer, judged=True)  # it was stopped during its evaluation
    while state.iteration < config.run.iterations and not out_of_patience(trainer):
        trainer.iterate()
        last = state.iteration == config.run.iterations or world.anyone(trainer.control.finish())
        _finish_iteration(trainer, bool(every) and (last or state.iteration % every == 0))
        world.rest()
        if last:
            break
    weights, iteration = chosen_weights(trainer)
    test = None
    if trainer.prompts.test and config.eval.test_prompts:
        test = judge(trainer, "test", iteration, weights)
    loras: list[Path] = []
    report = None
    if world.is_main:
        loras = list(export_run_loras(trainer, weights, iteration).values())
        trainer.event(
            "run_finished",
            state.iteration,
            status="finished",
            lora=[p.name for p in loras],
            best_iteration=iteration,
            iterations=config.run.iterations,
        )
        report = write_report(folder.path)
    world.rest()
    world.barrier()
    return RunResult("finished", folder.path, state.iteration, iteration, loras, test, report)
