"""LoRAs between link values and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..flashgrpo_core.build import with_embedded_files
from ..flashgrpo_core.config_io import build_config
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.export import write_lora
from ..flashgrpo_core.files import open_tensors, save_tensors
from ..flashgrpo_core.policy import adapter_pairs
from ..flashgrpo_core.runs.checkpoint import load_checkpoint, newest_checkpoint
from ..flashgrpo_core.runs.events import read_events
from ..flashgrpo_core.runs.folder import RunFolder
from ..flashgrpo_core.wan.detect import detect_transformer
from ..flashgrpo_core.wan.lora import export_lora, export_metadata, read_lora
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


def write_policy_lora(path: Path, policy: Policy, fmt: str, weights: str) -> None:
    """Write the LoRA of a policy with its full header.

    Args:
        path: target.
        policy: the policy, after at least one step.
        fmt: key format.
        weights: `live` or `ema`.

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
    spec = detect_transformer(open_tensors(with_embedded_files(config).model.transformer))
    adapter = _Adapter(policy.files.rank, policy.files.alpha, policy.files.dtype)
    write_lora(path, adapter, tensors, config, policy.iteration, spec, fmt)


def write_lora_model(path: Path, lora: Mapping[str, torch.Tensor], fmt: str) -> None:
    """Write a LORA_MODEL; other key formats than ComfyUI's are converted.

    Raises:
        FlashGRPOError: it is no Wan LoRA, or holds more than low-rank pairs.
    """
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in lora.items()}
    if not tensors:
        raise FlashGRPOError("the LoRA is empty: connect the output of Train or Load Run")
    if fmt == "comfyui":
        save_tensors(path, tensors, {})
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


def newest_lora(folder: RunFolder) -> LoraTensors | None:
    """The best LoRA of a run: the final one, else the last exported, else its newest weights."""
    path = newest_lora_file(folder)
    if path is not None:
        return lora_tensors(path)
    newest = newest_checkpoint(folder.checkpoints)
    if newest is None:
        return None
    tensors, _ = load_checkpoint(newest)
    alpha = folder.config().model.lora_alpha
    return LoraTensors(export_lora(adapter_pairs(tensors["adapter"]), alpha))


def newest_lora_file(folder: RunFolder) -> Path | None:
    """The exported LoRA that says most about a run, or None."""
    names: list[str] = []
    for event in read_events(folder.events):
        if event.get("event") == "lora":
            names.append(event["file"])
        elif event.get("event") == "run_finished" and event.get("lora"):
            names.append(event["lora"][0])
    for name in reversed(names):
        if (folder.lora / Path(name).name).is_file():
            return folder.lora / Path(name).name
    return None
