"""Finding the files that a configuration names: beside the TOML, then in a ComfyUI models folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from .config import Config
from .embedded import TINY
from .errors import FlashGRPOError

#: ComfyUI's folders per kind of file, in the order in which they are searched.
FOLDERS: dict[str, tuple[str, ...]] = {
    "transformer": ("diffusion_models", "unet"),
    "vae": ("vae",),
    "text_encoder": ("text_encoders", "clip"),
    "clip_vision": ("clip_vision",),
    "lora": ("loras",),
    "reward": ("flashgrpo_rewards", "clip_vision"),
    "prompts": (),
}

#: Settings of `[model]` that name a file, and its kind.
MODEL_FILES: dict[str, str] = {
    "transformer": "transformer",
    "transformer_low": "transformer",
    "vae": "vae",
    "text_encoder": "text_encoder",
    "clip_vision": "clip_vision",
    "continue_from": "lora",
    "continue_from_low": "lora",
}
#: Settings of `[prompts]` that name a file.
PROMPT_FILES = ("file", "validation_file", "test_file")


def find_file(
    name: str, kind: str, setting: str, base_dir: Path, models_dir: Path | None = None
) -> str:
    """Absolute path of a file or folder that a setting names.

    Args:
        name: absolute path, or a path relative to `base_dir` or to a folder of `models_dir`. An
            absolute one that is gone is looked up there by its name.
        kind: key of `FOLDERS`.
        setting: name of the setting, for the message.
        base_dir: folder of the TOML file.
        models_dir: ComfyUI's `models` folder, or any folder with such subfolders.

    Raises:
        FlashGRPOError: it is nowhere; the message says where it was looked for.
    """
    path = Path(name).expanduser()
    if path.is_absolute():
        candidates = [path]
        if models_dir is not None:
            # A run knows the files where they lay; the folder may have moved since.
            candidates += [models_dir / folder / path.name for folder in FOLDERS[kind]]
    else:
        candidates = [base_dir / path]
        if models_dir is not None:
            candidates += [models_dir / folder / path for folder in FOLDERS[kind]]
            candidates.append(models_dir / path)
    for candidate in candidates:
        if candidate.exists():
            # Symbolic links stay: model folders are often made of them.
            return str(candidate.absolute())
    places = ", ".join(str(c.parent.absolute()) for c in candidates)
    hint = (
        "" if models_dir or not FOLDERS[kind] else "; or point --models at ComfyUI's models folder"
    )
    raise FlashGRPOError(
        f"{setting} = {name!r} was not found (looked in {places}): check the name{hint}"
    )


def resolve_files(config: Config, base_dir: str | Path, models_dir: str | Path | None) -> Config:
    """A copy of the configuration in which every file is an absolute path.

    Empty settings and the embedded model `tiny` stay as they are.

    Args:
        config: the configuration as written.
        base_dir: folder that relative paths are looked up in first.
        models_dir: ComfyUI's `models` folder, or None.

    Raises:
        FlashGRPOError: a file is missing, or `models_dir` is no folder.
    """
    base = Path(base_dir)
    models = Path(models_dir).expanduser() if models_dir is not None else None
    if models is not None and not models.is_dir():
        raise FlashGRPOError(
            f"--models {str(models_dir)!r} is no folder: name ComfyUI's models folder"
        )
    config = copy.deepcopy(config)
    model, prompts = config.model, config.prompts
    for setting, kind in MODEL_FILES.items():
        name = getattr(model, setting)
        if name and name != TINY:
            setattr(model, setting, find_file(name, kind, f"model.{setting}", base, models))
    for entry in model.frozen_loras:
        entry["file"] = find_file(entry["file"], "lora", "model.frozen_loras file", base, models)
    for setting in PROMPT_FILES:
        name = getattr(prompts, setting)
        if name:
            setattr(
                prompts, setting, find_file(name, "prompts", f"prompts.{setting}", base, models)
            )
    config.reward.terms = resolve_terms(config.reward.terms, base, models)
    config.eval.terms = resolve_terms(config.eval.terms, base, models)
    return config


def resolve_terms(
    terms: list[dict[str, Any]], base_dir: Path, models_dir: Path | None = None
) -> list[dict[str, Any]]:
    """Reward terms in which every model file, also of a gate, is an absolute path.

    Args:
        terms: the tables of `reward.terms`.
        base_dir: folder that relative paths are looked up in first.
        models_dir: ComfyUI's `models` folder, or None.

    Raises:
        FlashGRPOError: a file is missing; the message says where to get it and where it belongs.
    """
    return [_resolved(term, base_dir, models_dir) for term in terms]


def _resolved(value: Any, base: Path, models: Path | None) -> Any:
    from .rewards import REWARDS

    if not isinstance(value, dict):
        return value
    found = {key: _resolved(inner, base, models) for key, inner in value.items()}
    name = value.get("name")
    reward = REWARDS.get(name) if isinstance(name, str) else None
    for option in getattr(reward, "files", ()):
        file = found.get(option)
        if isinstance(file, str) and file:
            try:
                found[option] = find_file(file, "reward", f"{option} of {name}", base, models)
            except FlashGRPOError as exc:
                raise FlashGRPOError(f"{exc}: {getattr(reward, 'source', '')}") from None
    return found


def adopt_moved_files(old: Config, new: Config) -> Config:
    """`old` with the paths of `new` where only the folder changed.

    A moved ComfyUI is the same one, and so is another machine that has the files elsewhere.
    """
    for table, keys in (("model", MODEL_FILES), ("prompts", PROMPT_FILES)):
        left, right = getattr(old, table), getattr(new, table)
        for key in keys:
            before, after = getattr(left, key), getattr(right, key)
            if before != after and before and after and _moved(before, after):
                setattr(left, key, after)
    for entry, other in zip(old.model.frozen_loras, new.model.frozen_loras, strict=False):
        if _moved(entry["file"], other["file"]):
            entry["file"] = other["file"]
    return old


def _moved(before: str, after: str) -> bool:
    name = before.replace("\\", "/").rpartition("/")[2]
    return name == Path(after).name and not Path(before).exists()
