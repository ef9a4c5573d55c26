"""What a model file is, for `flashgrpo inspect`, and the header of the LoRAs written here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import FlashGRPOError
from ..files import TensorFile, open_tensors
from .detect import WanSpec, detect_transformer, find_prefix, is_lora, kind_of
from .lora_read import in_diffusers_layout, lora_key, read_lora
from .transformer import diffusers_settings
from .vae import detect_vae
from .weights import SHORT, Weights, component_folder

_LORA_FORMATS: tuple[tuple[str, str], ...] = (
    ("diffusion_model.", "comfyui"),
    ("lora_unet__", "wan-fun"),
    ("lora_unet_", "kohya"),
    ("transformer.", "diffusers"),
    ("base_model.model.", "peft"),
    ("blocks.", "diffsynth"),
)


def describe(path: str | Path) -> dict[str, Any]:
    """Facts about a model file or folder, JSON-able.

    Returns:
        Always `path`, `files`, `kind` (`transformer`, `vae`, `text_encoder`, `lora` or `other`),
        `title`, `dtype`, `quantisation`, `parameters` and `metadata`. Besides:
        transformer and VAE: `architecture` (their spec); text encoder: `architecture`;
        LoRA: `format`, `ranks`, `alphas`, `effective_scales` (all sorted and distinct),
        `modules`, `keys`, `matched`, `unmatched` (key names; a LoRA with any is not for Wan).

    Raises:
        FlashGRPOError: not a readable safetensors checkpoint (GGUF, pickle, truncated, ...), or
            a Wan file that this version cannot use, which is said.
    """
    path = _component(Path(path))
    file = open_tensors(path)
    facts: dict[str, Any] = {
        "path": str(path),
        "files": [str(part) for part in file.files],
        "metadata": dict(sorted(file.metadata.items())),
    }
    title = kind_of(file)
    if is_lora(file):
        return {**facts, "kind": "lora", "title": title, **_lora(file)}
    if find_prefix(file):
        spec = detect_transformer(file, diffusers_settings(path).get("attention_head_dim", 128))
        name = "Wan diffusion model" if spec.size == "custom" else f"Wan {spec.size}"
        return {**facts, "kind": "transformer", "title": f"{name} ({spec.family})", **_split(spec)}
    if title == "a Wan VAE":
        vae = detect_vae(file)
        return {**facts, "kind": "vae", "title": f"Wan {vae.version} VAE", **_split(vae)}
    if title == "a T5/UMT5 text encoder":
        # Only here: the transformers library takes seconds to import.
        from .text import TOKENIZER, encoder_config

        config = encoder_config(file)
        weights = Weights(file, ignore=(TOKENIZER,))
        names = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "d_kv")
        architecture = {name: getattr(config, name) for name in names}
        architecture["tokenizer_inside"] = TOKENIZER in file
        return {
            **facts,
            "kind": "text_encoder",
            "title": "UMT5 text encoder",
            "architecture": architecture,
            **_storage(weights),
        }
    return {**facts, "kind": "other", "title": title, **_plain(file)}


def _component(path: Path) -> Path:
    """The transformer of a Diffusers pipeline folder, else the path itself."""
    return component_folder(path, "transformer") if path.is_dir() else path


def _split(spec: Any) -> dict[str, Any]:
    """A spec as `architecture` and the storage facts that every kind shares."""
    values = asdict(spec)
    storage = {
        "dtype": values.pop("weight_dtype"),
        "quantisation": values.pop("quantisation"),
        "parameters": values.pop("parameters"),
    }
    values["patch_size"] = list(values.get("patch_size", ()))
    if not values["patch_size"]:
        del values["patch_size"]
    return {"architecture": values, **storage}


def _storage(weights: Weights) -> dict[str, Any]:
    return {
        "dtype": weights.dtype,
        "quantisation": weights.quantisation,
        "parameters": weights.parameters,
    }


def _plain(file: TensorFile) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for key in file.keys():
        count = 1
        for size in file.shape(key):
            count *= size
        kinds[file.dtype_name(key)] = kinds.get(file.dtype_name(key), 0) + count
    largest = max(kinds, key=lambda kind: (kinds[kind], kind), default="")
    return {
        "dtype": SHORT.get(largest, largest),
        "quantisation": "unknown",
        "parameters": sum(kinds.values()),
    }


def _lora(file: TensorFile) -> dict[str, Any]:
    keys = file.keys()
    layout = in_diffusers_layout(keys)
    unmatched = [key for key in keys if lora_key(key, layout) is None]
    fmt = next(
        (name for prefix, name in _LORA_FORMATS if any(k.startswith(prefix) for k in keys)), "other"
    )
    facts = {
        "format": fmt,
        "keys": len(keys),
        "matched": len(keys) - len(unmatched),
        "unmatched": unmatched,
        **_plain(file),
        "quantisation": "none",
    }
    if unmatched:
        return {**facts, "modules": 0, "ranks": [], "alphas": [], "effective_scales": []}
    pairs = [pair for pair in read_lora(file.path).values() if pair.rank]
    return {
        **facts,
        "modules": len(pairs),
        "ranks": sorted({pair.rank for pair in pairs}),
        "alphas": sorted({pair.alpha for pair in pairs}),
        "effective_scales": sorted({pair.scale for pair in pairs}),
    }


def lora_metadata(
    *,
    name: str,
    spec: WanSpec,
    rank: int,
    alpha: float,
    base_file: str,
    base_sha256: str = "",
    vae_file: str = "",
    expert: str = "",
    iteration: int = 0,
    iterations: int = 0,
    seed: int = 0,
    learning_rate: float = 0.0,
    dtype: str = "",
    resolution: str = "",
    guidance: float | None = None,
    shift: float | None = None,
    max_grad_norm: float | None = None,
    gradient_checkpointing: bool | None = None,
    trained_sigmas: tuple[float, float] | None = None,
    rewards: Mapping[str, float] | None = None,
    config_sha256: str = "",
    comment: str = "",
    boundary: float | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Header of a LoRA file: what other trainers' readers look for, and what made it.

    Holds no times, so that equal runs give equal bytes; empty values are left out.

    Args:
        name: output name of the run.
        spec: the base model.
        rank: LoRA rank.
        alpha: LoRA alpha.
        base_file: file name of the base model, without its folder (paths are private).
        base_sha256: hash of the base model.
        vae_file: file name of the VAE.
        expert: `high_noise`, `low_noise` or empty.
        iteration: optimizer steps behind these weights.
        iterations: optimizer steps planned.
        seed: run seed.
        learning_rate: peak learning rate.
        dtype: compute dtype of the base.
        resolution: `WIDTHxHEIGHTxFRAMES`.
        guidance: classifier-free guidance of the rollouts.
        shift: flow shift of the schedule.
        max_grad_norm: gradient clip norm.
        gradient_checkpointing: whether it was on.
        trained_sigmas: highest and lowest noise level of the stochastic steps.
        rewards: reward name -> weight.
        config_sha256: hash of the resolved configuration.
        comment: free text.
        boundary: sigma at which the experts of a model with two change.
        extra: further header entries, such as those of `export_metadata`.
    """
    wan = "wan2.2" if spec.family.startswith("wan2.2") else "wan2.1"
    high, low = trained_sigmas or (None, None)
    own = _expert_range(expert, boundary)
    values: dict[str, Any] = {
        "ss_output_name": name,
        "ss_network_module": "networks.lora",
        "ss_network_dim": rank,
        "ss_network_alpha": float(alpha),
        "ss_base_model_version": spec.family,
        "ss_sd_model_name": Path(base_file).name,
        "ss_sd_model_hash": base_sha256,
        "ss_vae_name": Path(vae_file).name if vae_file else "",
        "ss_steps": iteration,
        "ss_max_train_steps": iterations,
        "ss_seed": seed,
        "ss_learning_rate": learning_rate,
        "ss_optimizer": "torch.optim.adamw.AdamW",
        "ss_mixed_precision": dtype,
        "ss_fp8_base": spec.quantisation != "none",
        "ss_guidance_scale": guidance,
        "ss_discrete_flow_shift": shift,
        "ss_max_grad_norm": max_grad_norm,
        "ss_gradient_checkpointing": gradient_checkpointing,
        "ss_training_comment": comment,
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{wan}/lora",
        "modelspec.implementation": f"https://github.com/Wan-Video/{wan.capitalize()}",
        "modelspec.title": name,
        "modelspec.resolution": resolution,
        "modelspec.prediction_type": "flow",
        "flashgrpo.method": "Flash-GRPO",
        "flashgrpo.expert": expert,
        "flashgrpo.iteration": iteration,
        "flashgrpo.base_family": spec.family,
        "flashgrpo.base_size": spec.size,
        "flashgrpo.base_sha256": base_sha256,
        "flashgrpo.shift": shift,
        "flashgrpo.trained_sigma_high": high,
        "flashgrpo.trained_sigma_low": low,
        "flashgrpo.expert_sigma_high": own and own[0],
        "flashgrpo.expert_sigma_low": own and own[1],
        "modelspec.timestep_range": _timesteps(own),
        "flashgrpo.rewards": json.dumps(dict(rewards), sort_keys=True) if rewards else "",
        "flashgrpo.config_sha256": config_sha256,
        **(extra or {}),
    }
    if expert not in ("", "high_noise", "low_noise"):
        raise FlashGRPOError(f"expert {expert!r} is unknown; use high_noise, low_noise or nothing")
    return {key: str(value) for key, value in sorted(values.items()) if value not in ("", None)}


def _timesteps(sigmas: tuple[float, float] | None) -> str:
    return "" if sigmas is None else f"{1000 * sigmas[1]:.0f},{1000 * sigmas[0]:.0f}"


def _expert_range(expert: str, boundary: float | None) -> tuple[float, float] | None:
    """Highest and lowest noise level that an expert is used at; None without experts."""
    if not expert or boundary is None:
        return None
    return (1.0, boundary) if expert == "high_noise" else (boundary, 0.0)
