"""Reading, checking and writing the configuration (TOML in, TOML out)."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import tomllib
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, get_type_hints

from .config import PRESETS, TINY, TRACKERS, Config
from .config_checks import check_method
from .errors import FlashGRPOError
from .presets import preset_tables

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = {"con", "prn", "aux", "nul"} | {f"{d}{i}" for d in ("com", "lpt") for i in range(1, 10)}

#: What a setting must be, in words: one, several.
_KINDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    dict: ('a table, e.g. { name = "motion" }', 'tables, e.g. [{ name = "motion" }]'),
    float: ("a number", "numbers"),
    int: ("a whole number", "whole numbers"),
    list: ("a list", "lists"),
    str: ('text in quotes, e.g. "..."', 'texts, e.g. ["..."]'),
}


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file, apply `table.key=value` overrides, fill in presets and validate.

    Args:
        path: the TOML file (also a job file or a run's `config.toml`).
        overrides: strings such as `optim.learning_rate=1e-4`; values are TOML, bare words strings.

    Raises:
        FlashGRPOError: the file is missing, is not TOML, or holds an unknown or bad setting.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FlashGRPOError(f"config file {str(path)!r} does not exist: check the path") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise FlashGRPOError(f"config file {str(path)!r} cannot be read: {exc}") from None
    except tomllib.TOMLDecodeError as exc:
        raise FlashGRPOError(f"config file {str(path)!r} is not valid TOML: {exc}") from None
    for text in overrides or []:
        apply_override(tables, text)
    return build_config(tables)


def apply_override(tables: dict[str, Any], text: str) -> None:
    """Set one `table.key=value` in `tables` in place.

    Raises:
        FlashGRPOError: the text has no `=` or no dot before it.
    """
    key, sep, raw = text.partition("=")
    table, dot, name = key.strip().partition(".")
    if not sep or not dot or not name:
        raise FlashGRPOError(
            f"override {text!r} is not table.key=value, e.g. optim.learning_rate=1e-4"
        )
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    if not isinstance(tables.setdefault(table, {}), dict):
        raise FlashGRPOError(f"setting {table!r} stands outside any table: put it under [table]")
    tables[table][name] = value


def build_config(tables: dict[str, Any]) -> Config:
    """Turn nested tables into a validated `Config`; presets fill what the tables do not set.

    Order of precedence, strongest first: the tables, the tiny model's values when
    `model.transformer` is `tiny`, `run.model_preset`, `run.preset`, the defaults.

    Raises:
        FlashGRPOError: unknown table or key, wrong type, value out of range or inconsistent.
    """
    merged: dict[str, dict[str, Any]] = {}
    for table, values in tables.items():
        if not isinstance(values, dict):
            raise FlashGRPOError(
                f"setting {table!r} stands outside any table: put it under [table]"
            )
    preset = tables.get("run", {}).get("preset", "recommended")
    if preset not in PRESETS:
        raise FlashGRPOError(
            f"run.preset {preset!r} is unknown: choose one of {', '.join(PRESETS)}"
        )
    layers = [PRESETS[preset]]
    wanted = tables.get("run", {}).get("model_preset", "")
    if wanted:
        layers.append(preset_tables(str(wanted)))
    if tables.get("model", {}).get("transformer") == "tiny":
        layers.append(TINY)
    for layer in [*layers, tables]:
        for table, values in layer.items():
            merged.setdefault(table, {}).update(values)
    config = Config()
    names = {f.name for f in dataclasses.fields(Config)}
    for table, values in merged.items():
        if table not in names:
            raise FlashGRPOError(f"unknown table [{table}]{_closest(table, names)}")
        _fill(getattr(config, table), table, values)
    validate(config)
    return config


def _closest(word: str, names: set[str]) -> str:
    match = difflib.get_close_matches(word, sorted(names), n=1)
    return f": did you mean {match[0]!r}?" if match else f": known are {', '.join(sorted(names))}"


def _fill(target: Any, table: str, values: dict[str, Any]) -> None:
    hints = get_type_hints(type(target))
    fields = {f.name: f for f in dataclasses.fields(target)}
    for key, value in values.items():
        if key not in fields:
            raise FlashGRPOError(f"unknown setting {table}.{key}{_closest(key, set(fields))}")
        setattr(target, key, check_value(f"{table}.{key}", value, hints[key], fields[key].metadata))


def check_value(name: str, value: Any, kind: Any, meta: Any) -> Any:
    """Check one setting against its type, range and choices; returns the value in its type.

    Raises:
        FlashGRPOError: naming the setting, the value and what is allowed.
    """
    origin = getattr(kind, "__origin__", kind)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        raise FlashGRPOError(
            f"{name} = {value!r} must be {_KINDS.get(origin, ('another value',))[0]}"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise FlashGRPOError(f"{name} = {value} must be a finite number")
        low, high = meta.get("low"), meta.get("high")
        if low is not None and value < low or high is not None and value > high:
            raise FlashGRPOError(f"{name} = {value} is outside {low} to {high}")
    if meta.get("choices") and value not in meta["choices"]:
        raise FlashGRPOError(
            f"{name} = {value!r} is unknown: choose one of {', '.join(meta['choices'])}"
        )
    if isinstance(value, list):
        item = (
            kind.__args__[0].__origin__
            if hasattr(kind.__args__[0], "__origin__")
            else kind.__args__[0]
        )
        if item is float:  # a whole number is a number too, as outside lists
            value = [float(v) if type(v) is int else v for v in value]
        if not all(isinstance(v, item) and not isinstance(v, bool) for v in value):
            raise FlashGRPOError(f"{name} = {value!r} must be a list of {_KINDS[item][1]}")
    return value


def check_run_name(name: str) -> str:
    """Return `name` when it can be a folder on every system, else raise `FlashGRPOError`."""
    if (
        not _RUN_NAME.fullmatch(name)
        or name.endswith(".")
        or name.split(".")[0].lower() in _RESERVED
    ):
        raise FlashGRPOError(
            f"run name {name[:80]!r} is not usable: letters, digits, '.', '-', '_', starting with a "
            "letter or digit, at most 64, no reserved Windows name"
        )
    return name


def check_size(width: int, height: int, frames: int) -> None:
    """Check that a video size fits Wan: multiples of 16, 4n+1 frames."""
    for label, value in (("width", width), ("height", height)):
        if value % 16:
            down, up = value // 16 * 16, -(-value // 16) * 16
            raise FlashGRPOError(
                f"{label} {value} is not divisible by 16: use {down or 16} or {up}"
            )
    if (frames - 1) % 4:
        down = (frames - 1) // 4 * 4 + 1
        raise FlashGRPOError(f"frame count {frames} is not 4n+1: use {down} or {down + 4}")


def sde_window(config: Config) -> tuple[int, int]:
    """The half-open window of SDE steps; by default the first half of the schedule, at least two."""
    if config.schedule.window:
        return config.schedule.window[0], config.schedule.window[1]
    if config.schedule.strategy == "full":  # the whole trajectory but the last step
        return 0, config.schedule.steps - 1
    return 0, min(max(2, config.schedule.steps // 2), config.schedule.steps - 1)


def flow_shift(config: Config) -> float:
    """The flow shift: the configured one, else 5.0 from 1280x720 pixels on and 3.0 below."""
    if config.schedule.shift > 0:
        return config.schedule.shift
    return 5.0 if config.rollout.width * config.rollout.height >= 1280 * 720 else 3.0


def validate(config: Config) -> None:
    """Check what single ranges cannot: sizes, window, distinct steps, reward and LoRA tables.

    Raises:
        FlashGRPOError: naming the value, the limit and the fix.
    """
    check_run_name(config.run.name)
    check_size(config.rollout.width, config.rollout.height, config.rollout.frames)
    if config.model.vae_tile % 64:
        raise FlashGRPOError(
            f"model.vae_tile = {config.model.vae_tile} is no multiple of 64: use 256, or 0 for off"
        )
    steps, window = config.schedule.steps, config.schedule.window
    if window and (len(window) != 2 or not 0 <= window[0] < window[1] <= steps - 1):
        raise FlashGRPOError(
            f"schedule.window = {window} must be [first, end) with 0 <= first < end <= {steps - 1} "
            f"(the last of {steps} steps is never stochastic)"
        )
    interval = config.rollout.guidance_interval
    if interval and (len(interval) != 2 or not 0 <= interval[0] < interval[1] <= 1):
        raise FlashGRPOError(
            f"rollout.guidance_interval = {interval} must be [low, high] with 0 <= low < high <= 1 "
            "(noise levels), or [] to guide everywhere"
        )
    if config.rollout.cache_threshold and config.model.shard:
        raise FlashGRPOError(
            f"rollout.cache_threshold = {config.rollout.cache_threshold:g} skips blocks whose weights "
            "model.shard gathers from all processes: set it to 0, or model.shard = false"
        )
    first, end = sde_window(config)
    if config.schedule.strategy != "flash" and config.model.transformer_low:
        raise FlashGRPOError(
            f"schedule.strategy = {config.schedule.strategy!r} is for models with one expert: use flash"
        )
    if config.schedule.strategy == "window" and config.schedule.train_steps > end - first:
        raise FlashGRPOError(
            f"schedule.train_steps = {config.schedule.train_steps} is more than the "
            f"{end - first} steps of the window [{first}, {end}): use at most {end - first}"
        )
    # With two experts each has a window of its own, see windows.py.
    if end - first < 2 and not config.model.transformer_low:
        raise FlashGRPOError(
            f"schedule.window = [{first}, {end}] of {steps} steps holds one step: an update over a single noise "
            "level collapses, use at least 2 eligible steps (and at least 4 steps in all by default)"
        )
    check_method(config)
    if config.schedule.sde == "cps" and config.schedule.eta > 1:
        raise FlashGRPOError(f"schedule.eta = {config.schedule.eta} is above 1 with cps: use 0.7")
    if not config.model.transformer:
        raise FlashGRPOError("model.transformer is empty: name a Wan .safetensors file, or `tiny`")
    _check_experts(config)
    for name, tables in (("reward.terms", config.reward.terms), ("eval.terms", config.eval.terms)):
        for term in tables:
            weight = term.get("weight", 1.0)
            if not isinstance(term.get("name"), str):
                raise FlashGRPOError(f'{name} entry {term!r} has no name: add name = "..."')
            if (
                isinstance(weight, bool)
                or not isinstance(weight, (int, float))
                or not math.isfinite(weight)
            ):
                raise FlashGRPOError(
                    f"{name} entry {term['name']!r}: weight {weight!r} must be a finite number"
                )
    if config.model.shard and config.model.offload:
        raise FlashGRPOError(
            "model.shard and model.offload exclude each other: sharded weights stay where they are; "
            "set model.offload = false"
        )
    if config.model.shard and (config.model.storage == "fp8" or config.model.blocks_to_swap):
        raise FlashGRPOError(
            "model.shard spreads whole weights: set model.storage = 'full' and "
            "model.blocks_to_swap = 0, or model.shard = false"
        )
    for name in config.run.trackers:
        if name not in TRACKERS:
            raise FlashGRPOError(f"run.trackers names {name!r}: choose from {', '.join(TRACKERS)}")
    if config.schedule.eta == 0:
        raise FlashGRPOError(
            "schedule.eta = 0 injects no noise, so there is no step to learn from: use 1.0 with flash, "
            "0.7 with flow or cps, 0.3 with dance"
        )
    terms = config.reward.terms
    if terms and all(term.get("weight", 1.0) == 0 for term in terms):
        raise FlashGRPOError("reward.terms all have weight 0: give at least one another weight")
    for entry in config.model.frozen_loras:
        strength = entry.get("strength", 1.0)
        known = {"file", "strength", "expert"}
        if set(entry) - known or not isinstance(entry.get("file"), str):
            raise FlashGRPOError(
                f"model.frozen_loras entry {entry!r} needs `file` and optional `strength`, `expert`"
            )
        expert = entry.get("expert", "")
        if expert not in ("", "high_noise", "low_noise"):
            raise FlashGRPOError(
                f"model.frozen_loras expert {expert!r} is unknown: use high_noise, low_noise, or "
                "leave it out for both"
            )
        if expert and not config.model.transformer_low:
            raise FlashGRPOError(
                f"model.frozen_loras entry {entry['file']!r} is for the {expert} expert, but the "
                "model has no experts: leave `expert` out, or set model.transformer_low"
            )
        if (
            isinstance(strength, bool)
            or not isinstance(strength, (int, float))
            or not math.isfinite(strength)
        ):
            raise FlashGRPOError(
                f"model.frozen_loras strength {strength!r} must be a finite number"
            )


def _check_experts(config: Config) -> None:
    """Settings of the low-noise expert need one, and its file must not be the other's."""
    model = config.model
    if model.transformer_low and model.transformer_low == model.transformer:
        raise FlashGRPOError(
            f"model.transformer_low is the same file as model.transformer ({model.transformer!r}): "
            "name the low-noise expert, or leave it empty"
        )
    if model.transformer_low:
        return
    for key, default in (("train_experts", "both"), ("boundary", 0.0), ("continue_from_low", "")):
        if getattr(model, key) != default:
            raise FlashGRPOError(
                f"model.{key} = {getattr(model, key)!r} is for a model with two experts: set "
                f"model.transformer_low, or leave {key} out"
            )


def to_tables(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as nested plain tables (JSON- and TOML-ready)."""
    return dataclasses.asdict(config)


def identity_differences(old: Config, new: Config) -> list[str]:
    """Settings that decide what is trained and differ, as `table.key: old -> new` lines."""
    lines = []
    for table in dataclasses.fields(Config):
        left, right = getattr(old, table.name), getattr(new, table.name)
        for f in dataclasses.fields(left):
            a, b = getattr(left, f.name), getattr(right, f.name)
            if f.metadata["identity"] and a != b:
                lines.append(f"{table.name}.{f.name}: {a!r} -> {b!r}")
    return lines


def config_hash(config: Config) -> str:
    """SHA-256 (hex) of every setting that decides what is trained; files count by name only.

    So the same run in another folder, or on another machine, has the same hash.
    """
    kept = {
        table.name: {
            f.name: _without_folders(getattr(getattr(config, table.name), f.name))
            for f in dataclasses.fields(getattr(config, table.name))
            if f.metadata["identity"]
        }
        for table in dataclasses.fields(Config)
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str):
        for kind in (PurePosixPath, PureWindowsPath):
            if kind(value).is_absolute():
                return kind(value).name
    return value


def dump_toml(config: Config) -> str:
    """The complete configuration as TOML text that `load_config` reads back unchanged."""
    lines = []
    for table, values in to_tables(config).items():
        lines.append(f"[{table}]")
        lines.extend(f"{key} = {_toml_value(value)}" for key, value in values.items())
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON strings are TOML strings, once DEL is escaped and no surrogate pairs are written.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_toml_value(str(k))} = {_toml_value(v)}" for k, v in value.items())
            + "}"
        )
    return str(value)
