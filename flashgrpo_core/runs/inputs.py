"""What a run is trained on: fingerprints of its model files and prompts.

A run goes on only with what it began with. Paths prove nothing: a file can be replaced under its
name, and a models folder can move. So `inputs.json` in the run folder holds a fingerprint of each
file's content and a short hash of each prompt, and these are compared instead.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import Config
from ..config_io import identity_differences
from ..errors import FlashGRPOError
from ..files import write_text_atomic
from ..lookup import MODEL_FILES, PROMPT_FILES
from ..prompts import Prompt, PromptSplit

NAME = "inputs.json"
FORMAT = 1

_HEAD = 1 << 20
_BLOCK = 1 << 16
_BLOCKS = 64
#: Marks in a Diffusers folder what belongs to the model.
_WEIGHTS = (".safetensors", ".json", ".model")

Inputs = dict[str, Any]


def fingerprint(path: str | Path) -> str:
    """SHA-256 (hex) over size, head and 64 blocks spread over a file; of a folder, over its files.

    Reading a 28 GB model whole would take a minute at every start. The head holds all names and
    shapes, and the blocks differ as soon as a model was trained on, since that changes everything.
    """
    path = Path(path)
    digest = hashlib.sha256()
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in _WEIGHTS)
    elif path.name.endswith(".index.json"):
        files = [path, *sorted(path.parent.glob("*.safetensors"))]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode() if len(files) > 1 else f"{size}\0".encode())
        with open(file, "rb") as handle:
            digest.update(handle.read(_HEAD))
            for block in range(_BLOCKS):
                handle.seek(max(_HEAD, block * (size - _BLOCK) // (_BLOCKS - 1)))
                digest.update(handle.read(_BLOCK))
    return digest.hexdigest()


def inputs_of(config: Config, prompts: PromptSplit) -> Inputs:
    """Fingerprints of everything that `config` names.

    Args:
        config: the configuration with absolute paths.
        prompts: its prompts, as read.

    Raises:
        FlashGRPOError: a file cannot be read.
    """
    try:
        files = {
            key: {"name": Path(path).name, "sha256": fingerprint(path)}
            for key, path in _texts(config)
            if os.path.isabs(path) and os.path.exists(path)
        }
        splits = {
            split: [_prompt_hash(p) for p in getattr(prompts, split)]
            for split in ("train", "validation", "test")
        }
    except OSError as exc:
        raise FlashGRPOError(
            f"{str(exc.filename)!r} cannot be read: {exc.strerror or exc}; check the file"
        ) from None
    return {"format": FORMAT, "files": files, "prompts": splits}


def read_inputs(folder: Path) -> Inputs | None:
    """What a run began with; None for runs from before this file existed."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise FlashGRPOError(
            f"{str(folder / NAME)!r} cannot be read: {exc}; delete it to go on without this check"
        ) from None
    known = isinstance(found, dict) and found.get("format") == FORMAT
    return found if known else None


def write_inputs(folder: Path, inputs: Inputs) -> None:
    """Write what a run is trained on beside its configuration."""
    write_text_atomic(folder / NAME, json.dumps(inputs, indent=1, sort_keys=True) + "\n")


def differences(
    old: Config, began: Inputs | None, new: Config, now: Inputs, prompts: PromptSplit
) -> list[str]:
    """What decides about the training and is not as it was, one line each.

    Args:
        old: configuration in the run folder.
        began: its inputs, or None.
        new: configuration to go on with.
        now: its inputs.
        prompts: its prompts, for the message.
    """
    if began is None:
        return identity_differences(old, new)
    names = {entry["sha256"]: entry["name"] for entry in began["files"].values()}
    found = identity_differences(
        _by_content(old, began["files"], names), _by_content(new, now["files"], names)
    )
    for split, before in began["prompts"].items():
        found += _prompt_changes(split, before, now["prompts"][split], getattr(prompts, split))
    return found


def _prompt_changes(
    split: str, before: list[str], after: list[str], prompts: list[Prompt]
) -> Iterator[str]:
    if before == after:
        return
    words = {"train": "training"}.get(split, split)
    known, present = set(before), set(after)
    added = [p.text for p, h in zip(prompts, after, strict=True) if h not in known]
    gone = sum(h not in present for h in before)
    if not added and not gone:
        yield f"{words} prompts: the same in another order"
        return
    shown = f" ({added[0][:60]!r}{', ...' if len(added) > 1 else ''})" if added else ""
    yield f"{words} prompts: {len(added)} added{shown}, {gone} removed"


def _prompt_hash(prompt: Prompt) -> str:
    digest = hashlib.sha256(prompt.text.encode("utf-8", "surrogatepass"))
    if prompt.image:
        digest.update(fingerprint(prompt.image).encode())
    return digest.hexdigest()[:16]


def _tables(config: Config) -> dict[str, Any]:
    """The settings that can name a file, prompts left out."""
    model = {f"model.{key}": getattr(config.model, key) for key in MODEL_FILES}
    return model | {
        "model.frozen_loras": config.model.frozen_loras,
        "reward.terms": config.reward.terms,
        "eval.terms": config.eval.terms,
    }


def _texts(config: Config) -> Iterator[tuple[str, str]]:
    """All texts of these settings, each with its place."""

    def walk(key: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for name, item in value.items():
                yield from walk(f"{key}.{name}", item)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                yield from walk(f"{key}[{i}]", item)
        elif isinstance(value, str):
            yield key, value

    for key, value in _tables(config).items():
        yield from walk(key, value)


def _by_content(config: Config, files: dict[str, Any], names: dict[str, str]) -> Config:
    """A copy in which files go by content; prompt files by nothing, as prompts are compared."""

    def walk(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: walk(f"{key}.{name}", item) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(f"{key}[{i}]", item) for i, item in enumerate(value)]
        if key not in files:
            return value
        sha256 = files[key]["sha256"]
        return f"{names.get(sha256, files[key]['name'])} (content {sha256[:12]})"

    config = copy.deepcopy(config)
    for key, value in _tables(config).items():
        table, _, name = key.partition(".")
        setattr(getattr(config, table), name, walk(key, value))
    for key in PROMPT_FILES:
        setattr(config.prompts, key, "")
    return config
