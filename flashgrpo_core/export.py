"""Export of the trained LoRA, and the proof that the file is the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .build import build_reward, build_schedule, with_embedded_files
from .config import Config
from .config_io import config_hash, flow_shift, sde_window
from .errors import FlashGRPOError
from .files import save_tensors, sha256_file, write_text_atomic
from .policy import AdapterFacts, WanPolicy, adapter_pairs, policy_weights
from .runs.events import utc_now
from .seeds import normal
from .wan.describe import lora_metadata
from .wan.detect import WanSpec
from .wan.lora import export_lora, export_metadata, read_lora

if TYPE_CHECKING:
    from .trainer import Trainer


def export_run_lora(
    trainer: Trainer, weights: Mapping[str, torch.Tensor], iteration: int, path: Path | None = None
) -> Path:
    """Export a run's weights and verify the file.

    Args:
        trainer: the run.
        weights: the adapter weights.
        iteration: training iterations behind them.
        path: target; None is `lora/<name>_<iteration>.safetensors` in the run folder.

    Raises:
        FlashGRPOError: the file cannot be written or does not reproduce the policy.
    """
    config = trainer.config
    path = path or trainer.folder.lora / f"{config.run.name}_{iteration:06d}.safetensors"
    write_lora(path, trainer.policy, weights, config, iteration, trainer.networks.spec)
    trainer.control.bring(trainer.policy.transformer)
    verify_lora(
        path,
        trainer.policy,
        weights,
        trainer.settings.latent_shape,
        trainer.context(config.prompts.negative),
        float(trainer.schedule.timesteps[sum(trainer.window) // 2]),
    )
    return path


def write_lora(
    path: Path,
    policy: AdapterFacts,
    weights: Mapping[str, torch.Tensor],
    config: Config,
    iteration: int,
    spec: WanSpec,
    fmt: str | None = None,
) -> str:
    """Write weights as a LoRA file with its full header and a JSON sidecar; returns its SHA-256.

    Args:
        path: target file; replaced atomically.
        policy: gives rank, alpha and dtype.
        weights: `WanPolicy.snapshot`-style tensors.
        config: settings recorded in the header.
        iteration: training iterations behind the weights.
        spec: architecture of the base.
        fmt: key format; None takes `run.lora_format`.
    """
    fmt = fmt or config.run.lora_format
    files = with_embedded_files(config)
    first, end = sde_window(config)
    sigmas = build_schedule(config).sigmas
    pairs = adapter_pairs(weights)
    r = config.rollout
    metadata = lora_metadata(
        name=path.stem,
        spec=spec,
        rank=policy.rank,
        alpha=policy.alpha,
        base_file=files.model.transformer,
        base_sha256=_base_hash(files.model.transformer),
        vae_file=files.model.vae,
        iteration=iteration,
        iterations=config.run.iterations,
        seed=config.run.seed,
        learning_rate=config.optim.learning_rate,
        dtype=str(policy.dtype).removeprefix("torch."),
        resolution=f"{r.width}x{r.height}x{r.frames}",
        guidance=r.guidance,
        shift=flow_shift(config),
        gradient_checkpointing=config.model.gradient_checkpointing,
        trained_sigmas=(round(float(sigmas[first]), 6), round(float(sigmas[end - 1]), 6)),
        rewards=build_reward(config).weights,
        config_sha256=config_hash(config),
        extra=export_metadata(pairs, policy.alpha, fmt),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = save_tensors(path, export_lora(pairs, policy.alpha, fmt), metadata)
    sidecar = {"sha256": digest, "created": utc_now(), "metadata": metadata}
    write_text_atomic(
        path.with_suffix(".json"), json.dumps(sidecar, indent=1, sort_keys=True) + "\n"
    )
    return digest


def _base_hash(path: str) -> str:
    """Hash of the base model's file, computed once per file state; empty for folders."""
    file = Path(path)
    if not file.is_file():
        return ""
    stat = file.stat()
    return _hash_of(str(file), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _hash_of(path: str, mtime: int, size: int) -> str:
    return sha256_file(path)


@torch.no_grad()
def verify_lora(
    path: Path,
    policy: WanPolicy,
    weights: Mapping[str, torch.Tensor],
    latent_shape: tuple[int, int, int, int],
    context: torch.Tensor,
    timestep: float,
) -> None:
    """Reload a LoRA file and compare the velocity it gives with the policy's.

    Raises:
        FlashGRPOError: the file does not reproduce the policy; it is removed.
    """
    loaded = policy_weights(policy, read_lora(path))
    # One latent frame is enough to pass through every adapted layer.
    latents = normal((1, latent_shape[0], 1, min(latent_shape[2], 16), min(latent_shape[3], 16)), 0)
    with policy.using(weights):
        expected = policy.velocity(latents, timestep, context)
    try:
        with policy.using(loaded):
            got = policy.velocity(latents, timestep, context)
    except FlashGRPOError as exc:
        path.unlink(missing_ok=True)
        raise FlashGRPOError(f"exported LoRA {path.name} does not fit the policy: {exc}") from None
    error = float((got - expected).abs().max())
    limit = 1e-3 * max(float(expected.abs().max()), 1e-6)
    if not error <= limit:
        path.unlink(missing_ok=True)
        raise FlashGRPOError(
            f"exported LoRA {path.name} differs from the policy by {error:.2e} (limit {limit:.2e}): not kept"
        )
