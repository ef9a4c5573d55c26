"""One optimizer step outside of a whole run, saved so that a run can go on from it."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch

from ..flashgrpo_core import __version__
from ..flashgrpo_core.build import build_prompts, needed_texts
from ..flashgrpo_core.config_io import config_hash
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.keeping import RunState, log_iteration, save, weights_hash
from ..flashgrpo_core.runs.checkpoint import checkpoint_name
from ..flashgrpo_core.runs.events import SCHEMA
from ..flashgrpo_core.runs.folder import free_name
from ..flashgrpo_core.trainer import Trainer
from . import pool
from .embeddings import embed
from .settings import merge, newest_iteration, run_config, run_folder
from .values import Policy, Scored, Tables

log = logging.getLogger(__name__)


def take_step(policy: Policy, scored: Scored, tables: Tables) -> tuple[Policy, dict[str, Any]]:
    """Change a policy by its scored rollouts and save the result in the run folder.

    When the run has moved on since (a second step from one policy), the result becomes a run of
    its own, under the next free name.

    Args:
        policy: the policy that sampled the rollouts.
        scored: the scored rollouts.
        tables: all settings of the run so far.

    Returns:
        The new policy, and the record of the iteration with `optimizer_steps` and `saved`.

    Raises:
        FlashGRPOError: the gradient is zero, or the folder cannot be written.
    """
    groups, iteration = scored.source.source, policy.iteration + 1
    name = policy.run
    if newest_iteration(name) >= iteration:
        name = free_name(run_folder(name).output, name)
        log.info("run %s has moved on: this step becomes the run %s", policy.run, name)
    folder = run_folder(name)
    # Every step is a point that someone may want to go back to: the newest are all kept.
    own = {"run": {"name": name, "iterations": iteration, "save_every": 1}}
    config = run_config(policy.files, groups.prompts, merge(tables, own))
    control = pool.control()
    split = build_prompts(config)
    context = embed(
        groups.prompts,
        policy.files,
        needed_texts(config, split) | {g.prompt for g in groups.groups},
        control,
        now={g.prompt for g in groups.groups} | {config.prompts.negative},
    )
    networks = pool.policy_networks(policy, config.run.seed, **pool.options(config))
    existed = folder.exists()
    if existed:
        folder.write_config(config)
    else:
        folder.create(config)
    with folder.lock():
        trainer = Trainer(config, networks, folder, control=control, embeddings=context)
        _continue(trainer, policy)
        if not existed:
            trainer.event(
                "run_started",
                policy.iteration,
                schema=SCHEMA,
                versions={"flashgrpo": __version__, "torch": torch.__version__},
                device=str(networks.device),
                world_size=1,
                resumed_from=policy.iteration or None,
                branch_of=policy.run if name != policy.run else None,
                sigmas=[round(float(s), 6) for s in trainer.schedule.sigmas],
                window=list(trainer.window),
                config_hash=config_hash(config),
            )
        record = _step(trainer, scored, iteration)
        save(trainer)
        state = {**vars(trainer.state), "weights": weights_hash(trainer)}
        new = Policy(
            policy.files,
            name,
            iteration,
            trainer.policy.snapshot(),
            {key: value.clone() for key, value in trainer.optimizer.ema.items()},
            trainer.optimizer.state(),
            state,
            state["weights"],
        )
    saved = f"run {name}, checkpoint {checkpoint_name(iteration)}"
    return new, {**record, "optimizer_steps": state["optimizer_steps"], "saved": saved}


def _continue(trainer: Trainer, policy: Policy) -> None:
    """Counters, moving average and AdamW's moments as they were; the weights are in place."""
    known = {key: policy.state[key] for key in vars(RunState()) if key in policy.state}
    trainer.state = RunState(**known)
    trainer.state.iteration = policy.iteration
    if policy.ema is not None:
        trainer.optimizer.ema = {key: value.clone() for key, value in policy.ema.items()}
    if policy.optimizer is not None:
        trainer.optimizer.load_state(policy.optimizer, trainer.state.optimizer_steps)


def _step(trainer: Trainer, scored: Scored, iteration: int) -> dict[str, Any]:
    """The step itself; returns the record of the iteration."""
    started, worked = time.monotonic(), time.process_time()
    groups = list(scored.source.source.groups)
    trainer.state.forwards_total += scored.source.forwards
    stats, norm = trainer.step(groups, list(scored.source.rollouts), scored.advantages, iteration)
    if stats is None or not math.isfinite(norm):
        raise FlashGRPOError(
            f"the gradient is not finite ({norm}): lower learning_rate or use dtype fp32 or bf16; "
            "the policy is unchanged"
        )
    trainer.state.iteration = iteration
    return log_iteration(
        trainer,
        iteration,
        groups,
        scored.scores,
        scored.advantages,
        stats,
        norm,
        (time.monotonic() - started, time.process_time() - worked),
    )
