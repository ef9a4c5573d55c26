"""Export of the trained LoRA, and the proof that the file is the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .config import Config
from .config_io import config_hash, flow_shift, sde_window
from .errors import FlashGRPOError
from .files import save_tensors, write_text_atomic
from .policy import WanPolicy
from .schedule import Schedule
from .seeds import normal
from .wan.lora import export_lora, lora_metadata, read_lora

if TYPE_CHECKING:
    from .trainer import Trainer


def export_run_lora(trainer: Trainer, weights: Mapping[str, torch.Tensor], iteration: int) -> Path:
    """Export a run's weights to `lora/<name>_<iteration>.safetensors` and verify the file."""
    config = trainer.config
    path = trainer.folder.lora / f"{config.run.name}_{iteration:06d}.safetensors"
    write_lora(
        path, trainer.policy, weights, config, iteration, trainer.schedule, trainer.networks.spec
    )
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
    policy: WanPolicy,
    weights: Mapping[str, torch.Tensor],
    config: Config,
    iteration: int,
    schedule: Schedule,
    spec: object,
    fmt: str | None = None,
) -> str:
    """Write weights as a LoRA file with its full header and a JSON sidecar; returns its SHA-256.

    Args:
        path: target file; replaced atomically.
        policy: gives alpha, rank and module names.
        weights: `WanPolicy.snapshot`-style tensors.
        config: settings recorded in the header.
        iteration: training iterations behind the weights.
        schedule: the rollout schedule.
        spec: architecture of the base.
        fmt: key format; None takes `run.lora_format`.
    """
    fmt = fmt or config.run.lora_format
    first, end = sde_window(config)
    tensors = export_lora(policy.lora_pairs(weights), policy.alpha, fmt)
    metadata = lora_metadata(
        spec=spec,
        fmt=fmt,
        name=path.stem,
        rank=policy.rank,
        alpha=policy.alpha,
        modules=list(policy.lora_pairs(weights)),
        extra={
            "flashgrpo.iteration": str(iteration),
            "flashgrpo.shift": repr(flow_shift(config)),
            "flashgrpo.schedule": config.schedule.kind,
            "flashgrpo.sigma_range": f"{schedule.sigmas[end - 1]:.4f},{schedule.sigmas[first]:.4f}",
            "flashgrpo.rewards": json.dumps(config.reward.terms, sort_keys=True),
            "flashgrpo.config_hash": config_hash(config),
            "ss_seed": str(config.run.seed),
            "ss_learning_rate": repr(config.optim.learning_rate),
            "ss_steps": str(iteration),
            "ss_max_train_steps": str(config.run.iterations),
            "ss_guidance_scale": repr(config.rollout.guidance),
            "ss_discrete_flow_shift": repr(flow_shift(config)),
        },
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = save_tensors(path, tensors, metadata)
    write_text_atomic(
        path.with_suffix(".json"),
        json.dumps({"sha256": digest, "metadata": metadata}, indent=1, sort_keys=True) + "\n",
    )
    return digest


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
    scale = policy.alpha / policy.rank
    loaded: dict[str, torch.Tensor] = {}
    for name, pair in read_lora(path).items():
        loaded[f"{name}.lora_A"] = pair.A.float()
        loaded[f"{name}.lora_B"] = pair.B.float() * (pair.alpha / pair.A.shape[0] / scale)
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
