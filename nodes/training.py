"""A whole run inside ComfyUI, and its LoRA as a link value."""

from __future__ import annotations

import logging
from pathlib import Path

from ..flashgrpo_core.build import build_prompts, needed_texts
from ..flashgrpo_core.config import Config
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.files import open_tensors
from ..flashgrpo_core.keeping import RunResult, finished_result, prepare_folder
from ..flashgrpo_core.lookup import adopt_moved_files
from ..flashgrpo_core.memory_fit import check_memory, total_bytes, with_changes
from ..flashgrpo_core.runs.checkpoint import list_checkpoints
from ..flashgrpo_core.runs.folder import RunFolder
from ..flashgrpo_core.training import train
from ..flashgrpo_core.windows import trained_experts
from . import host, pool
from .embeddings import embed
from .progress import TrainControl, training
from .settings import run_folder
from .values import LoraTensors, Policy, Prompts
from .workers import HERE, WORKERS, active_job, train_on_workers

log = logging.getLogger(__name__)


def train_run(
    policy: Policy, prompts: Prompts, config: Config, run_on: str = HERE
) -> tuple[RunResult, str]:
    """Train the run of a policy to its end, or return the result that is on disk.

    Args:
        policy: what is trained.
        prompts: prompts, for their encoder.
        config: the configuration of the run.
        run_on: whether it is trained here or by workers.

    Returns:
        The result, and the name of its LoRA (or those of two experts) as LoraLoader lists it.

    Raises:
        FlashGRPOError: the run exists with other settings, or cannot be trained.
    """
    folder, job = run_folder(policy.run), active_job(policy.run)
    if policy.run in training:
        raise FlashGRPOError(f"run {policy.run!r} is being trained already: wait for its end")
    if job is not None and run_on == HERE:
        raise FlashGRPOError(
            f"run {policy.run!r} is in the queue of the workers: set run_on to {WORKERS!r} to follow "
            "or cancel it, or choose another run name"
        )
    if job is None:
        _prepare(folder, config)
    control = TrainControl(pool.bring, config, folder.lora)
    result = finished_result(folder, config) if job is None else None
    if result is None and run_on == WORKERS:
        result = train_on_workers(folder, prompts, config)
    elif result is None:
        # ComfyUI moves networks, so each phase has the device for itself.
        alone = with_changes(config, {"model.offload": True})
        if prompts.encoder.startswith("clip:"):  # ComfyUI's CLIP has encoded them, in its own time
            alone = with_changes(alone, {"model.text_encoder": ""})
        check_memory(alone, host.compute_device(), total_bytes(host.compute_device()))
        training[policy.run] = control
        try:
            host.unload_others()
            texts = needed_texts(config, build_prompts(config))
            context = embed(prompts, policy.files, texts, control)
            networks = pool.policy_networks(policy, config.run.seed, **pool.options(config))
            result = train(config, control, networks=networks, embeddings=context)
        finally:
            training.pop(policy.run, None)
    if result.status != "finished":
        raise host.Interrupted()
    names = [control.publish(path) for path in result.loras]
    log.info("run %s is finished, its LoRA is listed as %s", policy.run, ", ".join(names))
    return result, ", ".join(names)


def _prepare(folder: RunFolder, config: Config) -> None:
    """Make the run folder, or check that the existing one is the same run."""
    if folder.exists():
        if list_checkpoints(folder.checkpoints):
            folder.write_config(adopt_moved_files(folder.config(), config))
        else:
            # Nothing has been trained yet: the settings may still change.
            folder.write_config(config)
    prepare_folder(folder, config, "auto")


def expert_loras(config: Config, result: RunResult) -> dict[str, LoraTensors]:
    """The exported LoRAs by expert; the name of a model's only network is empty."""
    pairs = zip(trained_experts(config), result.loras, strict=True)
    return {expert: lora_tensors(path) for expert, path in pairs}


def lora_tensors(path: Path) -> LoraTensors:
    """A LoRA file as LORA_MODEL."""
    file = open_tensors(path)
    return LoraTensors({key: file.get(key) for key in file.keys()}, file.metadata)
