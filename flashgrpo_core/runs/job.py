"""A job: a run that a worker is to train, as validated data.

A job file names files by where they lie below a folder of models or of runs, so that the machine
that trains may have these folders elsewhere. It holds settings and names, never code or commands,
and a worker opens nothing outside the folders it was started with.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import Config
from ..config_io import build_config, check_run_name, to_tables
from ..embedded import TINY
from ..errors import FlashGRPOError
from ..files import path_parts, resolve_inside
from ..lookup import FOLDERS, MODEL_FILES, PROMPT_FILES
from ..prompts import read_prompts
from ..rewards import REWARDS

#: Version of the job file. A worker refuses others: it could misread them.
SCHEMA = 1
#: Longest job file in bytes.
MAX_BYTES = 8 << 20
#: Marks a file in an option of a reward term; what follows is a name below a models folder.
MODEL_FILE = "models:"

_CLIP = "clip:"
_KEYS = {"schema", "id", "version", "run", "submitted", "config", "embeddings"}

Tables = dict[str, dict[str, Any]]
#: Kind of file and its path to its name below a folder of models.
NameOf = Callable[[str, str], str]


@dataclass(frozen=True)
class Job:
    """What a job file says.

    Attributes:
        id: random text that no other job has.
        version: version of the package that wrote it.
        run: name of the run.
        config: the complete configuration, with names in place of paths.
        embeddings: file of ready prompt embeddings in the run folder, or empty.
    """

    id: str
    version: str
    run: str
    config: Tables
    embeddings: str = ""

    def text(self, submitted: str) -> str:
        """The job file."""
        record = {
            "schema": SCHEMA,
            "id": self.id,
            "version": self.version,
            "run": self.run,
            "submitted": submitted,
            "embeddings": self.embeddings,
            "config": self.config,
        }
        return json.dumps(record, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def read_job(path: Path) -> Job:
    """Read and check a job file; files it names are checked by `job_config`.

    Raises:
        FlashGRPOError: naming what is wrong with it.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FlashGRPOError(
                f"job file {str(path)!r} has {path.stat().st_size} bytes, the limit is "
                f"{MAX_BYTES}: shorten its settings"
            )
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise FlashGRPOError(f"job file {str(path)!r} cannot be read: {exc}") from None
    if not isinstance(record, dict):
        raise FlashGRPOError(f"job file {str(path)!r} holds no table: write it again")
    if record.get("schema") != SCHEMA:
        raise FlashGRPOError(
            f"the job has schema {record.get('schema')!r} (written by version "
            f"{record.get('version')}), this worker ({__version__}) reads {SCHEMA}: install the "
            "same version of flashgrpo on both sides"
        )
    unknown = sorted(record.keys() - _KEYS)
    if unknown:
        raise FlashGRPOError(f"job file {str(path)!r} has the unknown field {unknown[0]!r}")
    for key in ("id", "version", "run", "embeddings"):
        if not isinstance(record.get(key), str):
            raise FlashGRPOError(f"job file {str(path)!r}: {key} must be text")
    config = record.get("config")
    if not isinstance(config, dict) or not all(isinstance(t, dict) for t in config.values()):
        raise FlashGRPOError(f"job file {str(path)!r}: config must be a table of tables")
    if not re.fullmatch(r"[0-9a-f]{8,64}", record["id"]):
        raise FlashGRPOError(f"job file {str(path)!r}: id must be 8 to 64 hexadecimal digits")
    if record["embeddings"] and not re.fullmatch(r"[\w-]+\.safetensors", record["embeddings"]):
        raise FlashGRPOError(
            f"job file {str(path)!r}: embeddings = {record['embeddings'][:80]!r} must be the name "
            "of a .safetensors file in the run folder"
        )
    check_run_name(record["run"])
    return Job(record["id"], record["version"], record["run"], config, record["embeddings"])


def portable(config: Config, output: Path, name_of: NameOf) -> Tables:
    """The tables of a configuration with names in place of paths.

    Args:
        config: the configuration, with absolute paths.
        output: the folder with the runs; prompts files must lie in it.
        name_of: gives the name of a model file below its models folder.

    Raises:
        FlashGRPOError: a prompts file lies elsewhere.
    """
    tables = copy.deepcopy(to_tables(config))
    for key, kind in MODEL_FILES.items():
        path = tables["model"][key]
        if path and path != TINY and not path.startswith(_CLIP):
            tables["model"][key] = name_of(kind, path)
    for entry in tables["model"]["frozen_loras"]:
        entry["file"] = name_of("lora", entry["file"])
    root = os.path.realpath(output)
    for key in PROMPT_FILES:
        if tables["prompts"][key]:
            path = os.path.realpath(tables["prompts"][key])
            if not path.startswith(root + os.sep):
                raise FlashGRPOError(
                    f"prompts file {path!r} lies outside {root!r}: workers could not read it"
                )
            tables["prompts"][key] = Path(path).relative_to(root).as_posix()
    for table in ("reward", "eval"):
        tables[table]["terms"] = _named(tables[table]["terms"], name_of)
    # Where the runs lie is the worker's business.
    tables["run"].pop("output")
    return tables


def job_config(job: Job, output: Path, models: list[Path]) -> Config:
    """The configuration of a job on this machine.

    Args:
        job: the job.
        output: this machine's path of the folder with the runs.
        models: folders that may hold model files, each like ComfyUI's `models` folder.

    Raises:
        FlashGRPOError: a setting is wrong, or a file is missing or outside these folders.
    """
    tables: Tables = copy.deepcopy(job.config)
    tables.setdefault("run", {}).update(output=str(output), name=job.run)
    config = build_config(tables)
    for key, kind in MODEL_FILES.items():
        name = getattr(config.model, key)
        if name and name != TINY and not name.startswith(_CLIP):
            found = _model_file(name, kind, f"model.{key}", output, models)
            setattr(config.model, key, found)
    for entry in config.model.frozen_loras:
        entry["file"] = _model_file(
            entry["file"], "lora", "model.frozen_loras file", output, models
        )
    for key in PROMPT_FILES:
        name = getattr(config.prompts, key)
        if name:
            path = resolve_inside(output, name)
            if not path.is_file():
                raise FlashGRPOError(f"prompts.{key} = {name!r} is not in {str(output)!r}")
            for image in (prompt.image for prompt in read_prompts(path)):
                if image and not any(
                    _inside(r, os.path.realpath(image)) for r in (*models, output)
                ):
                    raise FlashGRPOError(
                        f"start image {image!r} of prompts.{key} lies outside the folders of this "
                        f"worker: add --models {os.path.dirname(image)}"
                    )
            setattr(config.prompts, key, str(path))
    for table in ("reward", "eval"):
        target = getattr(config, table)
        target.terms = _found(target.terms, f"{table}.terms", output, models)
    return config


def _named(value: Any, name_of: NameOf) -> Any:
    """Options of a reward term, also of a gate in it, with names in place of paths."""
    if isinstance(value, dict):
        return {key: _named(inner, name_of) for key, inner in value.items()}
    if isinstance(value, list):
        return [_named(inner, name_of) for inner in value]
    if isinstance(value, str) and os.path.isabs(value):
        return MODEL_FILE + name_of("reward", value)
    return value


def _found(value: Any, setting: str, output: Path, models: list[Path]) -> Any:
    """The inverse of `_named` on this machine.

    Raises:
        FlashGRPOError: an address, a path, or a file that is not there.
    """
    if isinstance(value, list):
        return [_found(inner, setting, output, models) for inner in value]
    if isinstance(value, dict):
        reward = REWARDS.get(str(value.get("name")))
        found = {}
        for key, inner in value.items():
            if key in getattr(reward, "files", ()) and inner and isinstance(inner, str):
                inner = MODEL_FILE + inner.removeprefix(MODEL_FILE)
            where = f"{setting} {value.get('name') or ''} {key}"
            found[key] = _found(inner, where, output, models)
        return found
    if not isinstance(value, str):
        return value
    where = f"{setting} = {value[:80]!r}"
    if value.startswith(MODEL_FILE):
        return _model_file(value.removeprefix(MODEL_FILE), "reward", setting, output, models)
    if "://" in value:
        raise FlashGRPOError(f"{where} is an address: a job names servers, not addresses")
    if os.path.isabs(value) or ".." in re.split(r"[\\/]", value) or value.startswith("~"):
        raise FlashGRPOError(
            f"{where} is a path: a job names files below a models folder as {MODEL_FILE}NAME"
        )
    return value


def _model_file(name: str, kind: str, setting: str, output: Path, models: list[Path]) -> str:
    """Path of a model file; ComfyUI's own places inside the output folder count, too."""
    folders = FOLDERS.get(kind, ())
    roots = [*models, output]
    candidates = []
    for root in roots:
        for folder in folders:
            candidates.append((root / folder, name))
        candidates.append((root, name))
    for base, relative in candidates:
        try:
            path = base.joinpath(*path_parts(relative))
        except FlashGRPOError as exc:
            raise FlashGRPOError(f"{setting}: {exc}") from None
        if not path.exists():
            continue
        real = os.path.realpath(path)
        if not any(_inside(root, real) for root in roots):
            raise FlashGRPOError(
                f"{setting} = {name!r} is a link to {real!r}, outside the folders of this worker: "
                f"add --models {os.path.dirname(real)}"
            )
        return str(path.absolute())
    raise FlashGRPOError(
        f"{setting} = {name!r} is in none of this worker's folders "
        f"({', '.join(str(root) for root in roots)}): put it there, or start the worker with "
        "--models FOLDER"
    )


def _inside(root: Path, real: str) -> bool:
    base = os.path.realpath(root)
    try:
        return os.path.commonpath([base, real]) == base
    except ValueError:  # different drives
        return False
