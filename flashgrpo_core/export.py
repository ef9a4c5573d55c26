"""Export of the trained LoRA, and the proof that the file is the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .build import build_reward, build_schedule, with_embedded_files
from .conditioning import blank_image
from .config import Config
from .config_io import config_hash, flow_shift
from .errors import FlashGRPOError
from .experts import LOW, expert_weights
from .files import save_tensors, sha256_file, write_text_atomic
from .policy import AdapterFacts, WanPolicy, adapter_pairs, policy_weights
from .runs.events import utc_now
from .seeds import normal
from .wan.describe import lora_metadata
from .wan.detect import WanSpec
from .wan.lora import export_lora, export_metadata, read_lora
from .windows import expert_boundary, sde_windows

if TYPE_CHECKING:
    from .trainer import Trainer


def export_run_loras(
    trainer: Trainer, weights: Mapping[str, torch.Tensor], iteration: int
) -> dict[str, Path]:
    """Export a run's weights, one file for each trained expert, and verify the files.

    Args:
        trainer: the run.
        weights: the adapter weights.
        iteration: training iterations behind them.

    Returns:
        Expert -> file `lora/<name>[_<expert>]_<iteration>.safetensors` in the run folder.

    Raises:
        FlashGRPOError: a file cannot be written or does not reproduce the policy.
    """
    config, found = trainer.config, {}
    for name, expert in trainer.policy.trained.items():
        path = trainer.folder.lora / lora_file_name(config.run.name, name, iteration)
        own = expert_weights(weights, name)
        write_lora(path, expert, own, config, iteration, trainer.networks.spec, expert=name)
        trainer.control.bring(expert.transformer)
        window = trainer.windows[name]
        verify_lora(
            path,
            expert,
            own,
            trainer.settings.latent_shape,
            trainer.context(config.prompts.negative),
            float(trainer.schedule.timesteps[sum(window) // 2]),
            trainer.networks.spec,
        )
        found[name] = path
    return found


def lora_file_name(run: str, expert: str, iteration: int) -> str:
    """Name of an exported file; the expert stands in it, as users and loaders expect."""
    return f"{run}{f'_{expert}' if expert else ''}_{iteration:06d}.safetensors"


def write_lora(
    path: Path,
    policy: AdapterFacts,
    weights: Mapping[str, torch.Tensor],
    config: Config,
    iteration: int,
    spec: WanSpec,
    fmt: str | None = None,
    expert: str = "",
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
        expert: `high_noise` or `low_noise` for one of two experts.
    """
    fmt = fmt or config.run.lora_format
    files = with_embedded_files(config)
    first, end = sde_windows(config)[expert]
    sigmas = build_schedule(config).sigmas
    boundary = expert_boundary(config) if expert else None
    low = expert == LOW
    base = files.model.transformer_low if low else files.model.transformer
    pairs = adapter_pairs(weights)
    r = config.rollout
    metadata = lora_metadata(
        name=path.stem,
        spec=spec,
        rank=policy.rank,
        alpha=policy.alpha,
        base_file=base,
        base_sha256=_base_hash(base),
        vae_file=files.model.vae,
        iteration=iteration,
        iterations=config.run.iterations,
        seed=config.run.seed,
        learning_rate=config.optim.learning_rate,
        dtype=str(policy.dtype).removeprefix("torch."),
        resolution=f"{r.width}x{r.height}x{r.frames}",
        guidance=(r.guidance_low or r.guidance) if low else r.guidance,
        shift=flow_shift(config),
        gradient_checkpointing=config.model.gradient_checkpointing,
        trained_sigmas=(round(float(sigmas[first]), 6), round(float(sigmas[end - 1]), 6)),
        rewards=build_reward(config).weights,
        config_sha256=config_hash(config),
        expert=expert,
        boundary=boundary,
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
    spec: WanSpec | None = None,
) -> None:
    """Reload a LoRA file and compare the velocity it gives with the policy's.

    Raises:
        FlashGRPOError: the file does not reproduce the policy; it is removed.
    """
    loaded = policy_weights(policy, read_lora(path))
    # One latent frame is enough to pass through every adapted layer.
    latents = normal((1, latent_shape[0], 1, min(latent_shape[2], 16), min(latent_shape[3], 16)), 0)
    # Image-to-video models need their further channels, whatever is in them.
    image = None if spec is None else blank_image(spec, latents.shape[1:])
    with policy.using(weights):
        expected = policy.velocity(latents, timestep, context, image=image)
    try:
        with policy.using(loaded):
            got = policy.velocity(latents, timestep, context, image=image)
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
