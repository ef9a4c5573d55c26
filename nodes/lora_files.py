"""LoRAs between link values and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..flashgrpo_core.config_io import build_config
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.experts import expert_names, expert_weights
from ..flashgrpo_core.export import write_lora
from ..flashgrpo_core.files import save_tensors
from ..flashgrpo_core.networks import model_spec
from ..flashgrpo_core.policy import adapter_pairs
from ..flashgrpo_core.runs.checkpoint import load_checkpoint, newest_checkpoint
from ..flashgrpo_core.runs.events import read_events
from ..flashgrpo_core.runs.folder import RunFolder
from ..flashgrpo_core.wan.lora import export_lora, export_metadata, read_lora
from ..flashgrpo_core.windows import trained_experts
from .settings import run_folder
from .training import lora_tensors
from .values import LoraTensors, Policy

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Adapter:
    """What the core's exporter asks of a policy, without its network."""

    rank: int
    alpha: float
    dtype: str


def write_policy_loras(path: Path, policy: Policy, fmt: str, weights: str) -> dict[str, Path]:
    """Write the LoRA of a policy, or those of its two experts, with their full header.

    Args:
        path: target; with two experts their names are added.
        policy: the policy, after at least one step.
        fmt: key format.
        weights: `live` or `ema`.

    Returns:
        Expert -> file; the name of a model's only network is empty.

    Raises:
        FlashGRPOError: the policy is untrained.
    """
    tensors = policy.ema if weights == "ema" else policy.adapter
    if tensors is None:
        raise FlashGRPOError(
            f"run {policy.run!r} has no trained weights yet: put a Train Step before, or use the "
            "LoRA of Train"
        )
    folder = run_folder(policy.run)
    config = folder.config() if folder.exists() else build_config({"model": policy.files.table()})
    spec = model_spec(config)
    adapter = _Adapter(policy.files.rank, policy.files.alpha, policy.files.dtype)
    written = {}
    for expert in expert_names(tensors):
        target = path.with_stem(f"{path.stem}_{expert}") if expert else path
        own = expert_weights(tensors, expert)
        write_lora(target, adapter, own, config, policy.iteration, spec, fmt, expert)
        written[expert] = target
    return written


def write_lora_model(path: Path, lora: Mapping[str, torch.Tensor], fmt: str) -> None:
    """Write a LORA_MODEL; other key formats than ComfyUI's are converted.

    Raises:
        FlashGRPOError: it is no Wan LoRA, or holds more than low-rank pairs.
    """
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in lora.items()}
    if not tensors:
        raise FlashGRPOError("the LoRA is empty: connect the output of Train or Load Run")
    if fmt == "comfyui":
        save_tensors(path, tensors, lora.metadata if isinstance(lora, LoraTensors) else {})
        return
    pairs: Pairs = {}
    alphas = set()
    for name, pair in read_lora(tensors).items():
        if pair.A is None or pair.B is None or pair.diff is not None or pair.diff_b is not None:
            raise FlashGRPOError(
                f"the LoRA changes {name} by more than a low-rank pair, which key format {fmt} "
                "cannot hold: use key format comfyui"
            )
        # One alpha for the file; the pairs take up the difference.
        pairs[name] = (pair.A, pair.B * pair.scale)
        alphas.add(pair.rank)
    if len(alphas) != 1:
        raise FlashGRPOError(
            f"the LoRA has pairs of ranks {sorted(alphas)}, key format {fmt} needs one: use key "
            "format comfyui"
        )
    alpha = float(alphas.pop())
    save_tensors(path, export_lora(pairs, alpha, fmt), export_metadata(pairs, alpha, fmt))


def newest_loras(folder: RunFolder) -> dict[str, LoraTensors]:
    """The best LoRA of a run by expert: the final one, else the last exported, else its newest.

    The name of a model's only network is empty. Nothing before the first checkpoint.
    """
    files = newest_lora_files(folder)
    if files:
        return {expert: lora_tensors(path) for expert, path in files.items()}
    newest = newest_checkpoint(folder.checkpoints)
    if newest is None:
        return {}
    tensors, _ = load_checkpoint(newest)
    adapter, alpha = tensors["adapter"], folder.config().model.lora_alpha
    return {
        expert: LoraTensors(export_lora(adapter_pairs(expert_weights(adapter, expert)), alpha))
        for expert in expert_names(adapter)
    }


def newest_lora_files(folder: RunFolder) -> dict[str, Path]:
    """The exported LoRAs that say most about a run, by expert; empty before the first."""
    exports: list[dict[str, str]] = []
    experts = trained_experts(folder.config())
    for event in read_events(folder.events):
        if event.get("event") == "lora":
            expert = event.get("expert", "")
            if expert == experts[0]:
                exports.append({})
            if exports:
                exports[-1][expert] = event["file"]
        elif event.get("event") == "run_finished" and event.get("lora"):
            exports.append(dict(zip(experts, event["lora"], strict=False)))
    for export in reversed(exports):
        found = {expert: folder.lora / Path(name).name for expert, name in export.items()}
        if len(found) == len(experts) and all(path.is_file() for path in found.values()):
            return found
    return {}
