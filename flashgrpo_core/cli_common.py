"""What the commands of the command line share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import Config
from .config_io import build_config, load_config
from .errors import FlashGRPOError
from .lookup import resolve_files
from .runs.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint, read_manifest
from .runs.folder import RunFolder


@dataclass
class Answer:
    """What a command found out.

    Attributes:
        text: for people.
        data: for programs (`--json`).
        code: exit status.
    """

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    code: int = 0


def load_job(path: str, overrides: list[str], models: str | None) -> Config:
    """The configuration in a TOML file or run folder, with overrides and absolute files.

    A `config.toml` inside a run folder belongs to that run wherever the folder lies now.

    Raises:
        FlashGRPOError: it cannot be read, or names files that are missing.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.toml"
    config = load_config(file, overrides)
    place = file.absolute().parent
    if place.parent.name == "runs" and place.parent.parent.name == "flashgrpo":
        config.run.output, config.run.name = str(place.parent.parent.parent), place.name
    return resolve_files(config, place, models)


def job_of(args: Any) -> Config:
    """The configuration of a command that takes CONFIG, or the model files as options.

    Raises:
        FlashGRPOError: neither is given.
    """
    extra = list(args.set)
    files = {
        "model.transformer": args.transformer,
        "model.vae": args.vae,
        "model.text_encoder": args.text_encoder,
    }
    if args.config:
        here = Path.cwd()
        # Files on the command line are relative to where the user stands, not to the TOML.
        for name, value in files.items():
            if value:
                known = value == "tiny" or not (here / value).exists()
                extra.append(f"{name}={_toml_text(value if known else str(here / value))}")
        return load_job(args.config, extra, args.models)
    if not args.transformer:
        raise FlashGRPOError(
            "no model is named: give a CONFIG.toml or run folder, or --transformer FILE with "
            "--vae and --text-encoder (--transformer tiny is the embedded model)"
        )
    tables: dict[str, dict[str, Any]] = {"model": {}}
    for name, value in files.items():
        if value:
            tables["model"][name.removeprefix("model.")] = value
    from .config_io import apply_override

    for text in args.set:
        apply_override(tables, text)
    return resolve_files(build_config(tables), Path.cwd(), args.models)


def _toml_text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def reward_terms(texts: list[str]) -> list[dict[str, Any]]:
    """Reward terms from `name`, `name=weight` or an inline TOML table.

    Raises:
        FlashGRPOError: a text is none of these.
    """
    import tomllib

    terms = []
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                terms.append(tomllib.loads(f"term = {text}")["term"])
            except tomllib.TOMLDecodeError as exc:
                raise FlashGRPOError(f"--reward {text!r} is no TOML table: {exc}") from None
            continue
        name, sep, weight = text.partition("=")
        try:
            terms.append({"name": name.strip(), "weight": float(weight) if sep else 1.0})
        except ValueError:
            raise FlashGRPOError(
                f"--reward {text!r}: the weight {weight!r} is no number, write e.g. motion=0.5"
            ) from None
    return terms


@dataclass
class SavedWeights:
    """Adapter weights of a checkpoint and where they come from."""

    tensors: dict[str, Any]
    iteration: int
    weights: str


def saved_weights(run: RunFolder, which: str, weights: str | None) -> SavedWeights:
    """Adapter weights of a run.

    Args:
        run: the run.
        which: `best` (by validation; the newest when none was better than the start), `latest`,
            or an iteration.
        weights: `ema` or `live`; None takes what the run's evaluations judge.

    Raises:
        FlashGRPOError: no such checkpoint, or no EMA in it.
    """
    config = run.config()
    judged = "ema" if config.eval.weights == "ema" and config.optim.ema_decay > 0 else "live"
    wanted = weights or judged
    if wanted == "ema" and config.optim.ema_decay == 0:
        raise FlashGRPOError("the run has no EMA (optim.ema_decay = 0): use --weights live")
    if which in ("best", "latest"):
        path = newest_checkpoint(run.checkpoints)
        if path is None:
            raise FlashGRPOError(f"run {run.name!r} has no checkpoint yet: train it first")
        best = read_manifest(path)["state"].get("best_iteration", -1)
        if which == "best" and best > 0:
            if wanted == judged:
                tensors, _ = load_checkpoint(path)
                if "best" in tensors:
                    return SavedWeights(tensors["best"], best, wanted)
            path = _checkpoint(run, best)
    else:
        path = _checkpoint(run, int(which))
    tensors, _ = load_checkpoint(path)
    name = "ema" if wanted == "ema" else "adapter"
    if name not in tensors:
        raise FlashGRPOError(
            f"checkpoint {path.name} holds no {wanted} weights: use the other kind"
        )
    return SavedWeights(tensors[name], read_manifest(path)["iteration"], wanted)


def _checkpoint(run: RunFolder, iteration: int) -> Path:
    found = list_checkpoints(run.checkpoints)
    if iteration not in found:
        kept = ", ".join(map(str, found)) or "none"
        raise FlashGRPOError(
            f"run {run.name!r} has no checkpoint of iteration {iteration}: kept are {kept}"
        )
    return found[iteration]


def table(rows: list[list[str]], indent: str = "") -> str:
    """Rows as columns of equal width; all but the first right-aligned."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def facts(rows: list[tuple[str, Any]]) -> str:
    """Names and values, one a line; empty values are left out."""
    rows = [(name, value) for name, value in rows if value not in (None, "", [])]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def size_words(count: float) -> str:
    """Bytes as `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
