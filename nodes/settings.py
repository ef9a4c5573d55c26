"""From link values to the configuration of a run, and from a run on disk back to a policy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..flashgrpo_core.config import Config
from ..flashgrpo_core.config_io import build_config, check_run_name, identity_differences
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.files import write_text_atomic
from ..flashgrpo_core.lookup import adopt_moved_files
from ..flashgrpo_core.prompts import Prompt
from ..flashgrpo_core.runs.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint
from ..flashgrpo_core.runs.folder import RunFolder, free_name
from . import host
from .embeddings import TINY
from .values import FrozenLoras, ModelFiles, Policy, Prompts, Tables


def merge(*layers: Tables) -> Tables:
    """Tables with those of later layers on top."""
    merged: Tables = {}
    for layer in layers:
        for table, values in layer.items():
            merged.setdefault(table, {}).update(values)
    return merged


def run_config(files: ModelFiles, prompts: Prompts, *layers: Tables) -> Config:
    """The complete configuration of a run.

    Args:
        files: the model.
        prompts: the prompts; they are written to a file whose name follows from its content.
        *layers: further tables, later ones on top. What the model's own node says stays above a
            preset for the model.

    Raises:
        FlashGRPOError: settings that do not go together.
    """
    if not files.tiny and prompts.encoder == TINY:
        raise FlashGRPOError(
            "the tiny text encoder belongs to the tiny Wan: choose umt5_xxl_*.safetensors in the "
            "Prompts node, or connect a CLIP"
        )
    encoder = "" if prompts.encoder == TINY else prompts.encoder
    model = {**files.table(), "text_encoder": encoder, "text_tokens": prompts.tokens}
    return build_config(
        merge(
            {"prompts": prompt_table(prompts), "run": _place()},
            *layers,
            {"model": model},
        )
    )


def _place() -> dict[str, Any]:
    return {"output": str(host.output_folder())}


def prompt_table(prompts: Prompts) -> dict[str, Any]:
    """The `[prompts]` table; writes the prompt files that are not there yet."""
    table: dict[str, Any] = {
        "file": _prompts_file(prompts.train),
        "negative": prompts.negative,
        "validation_share": prompts.validation_share,
        "test_share": prompts.test_share,
    }
    if prompts.validation is not None:
        table["validation_file"] = _prompts_file(prompts.validation)
    if prompts.test is not None:
        table["test_file"] = _prompts_file(prompts.test)
    return table


def _prompts_file(prompts: Iterable[Prompt]) -> str:
    folder = host.output_folder() / "flashgrpo" / "prompts"
    lines = []
    for p in prompts:
        record = {"prompt": p.text}
        if p.image:
            record["image"] = _beside(p.image, folder)
        lines.append(json.dumps(record, ensure_ascii=False))
    text = "\n".join(lines) + "\n"
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
    return str(path)


def _beside(image: str, folder: Path) -> str:
    """Path of an image relative to the prompts file, so that a moved ComfyUI is the same."""
    try:
        return Path(os.path.relpath(image, folder)).as_posix()
    except ValueError:  # another drive
        return image


def window(first: int, end: int, steps: int) -> list[int]:
    """The SDE window of two widgets; unset (0 or -1) is the first half of the steps."""
    if first <= 0 and end <= 0:
        return []
    return [max(first, 0), end if end > 0 else max(steps // 2, 1)]


def run_folder(name: str) -> RunFolder:
    """The folder of a run in ComfyUI's output folder.

    Raises:
        FlashGRPOError: no usable name, or a link leads out of the output folder.
    """
    check_run_name(name)
    folder = RunFolder(host.output_folder(), name)
    host.inside_output(folder.path)
    return folder


def newest_iteration(name: str) -> int:
    """Newest iteration of a run on disk, 0 before the first."""
    return max(list_checkpoints(run_folder(name).checkpoints), default=0)


def load_policy(files: ModelFiles, name: str) -> Policy:
    """The policy of a run where it stands on disk.

    Raises:
        FlashGRPOError: the run exists with another model or LoRA shape (listed).
    """
    folder = run_folder(name)
    if not folder.exists():
        return Policy(files, name)
    new = build_config({"model": files.table()})
    old = folder.config()
    differences = [
        line
        for line in identity_differences(adopt_moved_files(old, new), new)
        if line.removeprefix("model.").partition(":")[0] in files.table() and "model." in line
    ]
    newest = newest_checkpoint(folder.checkpoints)
    if newest is None:
        return Policy(files, name)
    if differences:
        raise FlashGRPOError(
            f"run {name!r} exists with other settings ({'; '.join(differences)}): use its settings, "
            f"or the free name {free_name(folder.output, name)!r}"
        )
    tensors, state = load_checkpoint(newest)
    return Policy(
        files,
        name,
        state["iteration"],
        tensors["adapter"],
        tensors["ema"],
        tensors.get("optimizer", {}),
        state,
        state["weights"],
    )


def files_of(config: Config) -> ModelFiles:
    """The model files of a run on disk."""
    model = config.model
    return ModelFiles(
        model.transformer,
        model.vae,
        model.dtype,
        model.lora_rank,
        model.lora_alpha,
        tuple(model.lora_targets),
        model.continue_from,
        FrozenLoras(
            tuple(
                (e["file"], float(e.get("strength", 1.0)), e.get("expert", ""))
                for e in model.frozen_loras
            )
        ),
        model.transformer_low,
        model.train_experts,
        model.boundary,
        model.continue_from_low,
        model.clip_vision,
        model.storage,
        model.blocks_to_swap,
    )
