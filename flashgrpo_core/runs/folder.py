"""The run folder `<output>/flashgrpo/runs/<name>/`: the only place where a run keeps state."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .. import fence
from ..config import Config
from ..config_io import check_run_name, dump_toml, load_config
from ..errors import FlashGRPOError
from ..files import write_text_atomic
from .events import backwards, jsonable

#: Events that say a run is being worked on; reading backwards, they settle the status.
_WORKING = {"run_started", "iteration", "phase", "checkpoint"}


class RunFolder:
    """Paths and state of one run.

    Args:
        output: ComfyUI's output folder, or the command line's `./output`.
        name: the run's name; it becomes the folder name.

    Raises:
        FlashGRPOError: `name` cannot be a folder name on every system.
    """

    def __init__(self, output: str | Path, name: str) -> None:
        self.output = Path(output)
        self.name = check_run_name(name)
        self.path = runs_root(output) / self.name
        self.config_path = self.path / "config.toml"
        self.events = self.path / "events.jsonl"
        self.rewards = self.path / "rewards.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.samples_index = self.samples / "index.json"
        self.lora = self.path / "lora"
        self.report = self.path / "report.html"
        self.lock_path = self.path / ".lock"

    @classmethod
    def at(cls, path: str | Path) -> RunFolder:
        """The run that lives at `path`, which ends in `flashgrpo/runs/<name>`.

        Raises:
            FlashGRPOError: there is no run at `path`.
        """
        full = Path(os.path.abspath(path))
        if full.parent.name != "runs" or full.parent.parent.name != "flashgrpo":
            raise FlashGRPOError(
                f"{str(path)!r} is no run folder: it must be <output>/flashgrpo/runs/<name>"
            )
        run = cls(full.parent.parent.parent, full.name)
        if not run.exists():
            raise FlashGRPOError(f"{str(path)!r} holds no run: it has no config.toml")
        return run

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def exists(self) -> bool:
        """Whether a run was created here."""
        return self.config_path.is_file()

    def create(self, config: Config) -> None:
        """Make the folders and write the complete configuration.

        Raises:
            FlashGRPOError: the run exists already, or the folder cannot be written.
        """
        if self.exists():
            other = free_name(self.output, self.name)
            raise FlashGRPOError(
                f"run {self.name!r} exists already in {str(self.path.parent)!r}: resume it, or "
                f"name the new one {other!r}"
            )
        try:
            for path in (self.checkpoints, self.samples, self.lora):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise FlashGRPOError(
                f"run folder {str(self.path)!r} cannot be made: {exc.strerror or exc}; choose "
                "another run.output"
            ) from exc
        self.write_config(config)

    def write_config(self, config: Config) -> None:
        """Replace `config.toml`, e.g. when a resumed run is to go on for longer."""
        write_text_atomic(self.config_path, dump_toml(config))

    def config(self) -> Config:
        """The configuration of the run as it stands on disk."""
        return load_config(self.config_path)

    def status(self) -> str:
        """`new`, `unfinished`, `finished` or `failed`, from the events on disk.

        A cancelled run and one that died without a word are both unfinished: they can be resumed.
        """
        if not self.exists():
            return "new"
        for record in backwards(self.events):
            kind = record.get("event")
            if kind == "run_finished":
                status = str(record.get("status"))
                return status if status in ("finished", "failed") else "unfinished"
            if kind in _WORKING:
                break
        return "unfinished"

    def add_samples(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add videos to `samples/index.json`; the same (iteration, split, prompt, seed) replaces.

        Args:
            entries: tables with iteration, split, prompt, seed, file, reward, baseline_file and
                baseline_reward; files are relative to `samples/`.
        """
        known = {_sample_key(entry): entry for entry in self.read_samples()}
        for entry in entries:
            known[_sample_key(entry)] = jsonable(entry)
        rows = sorted(known.values(), key=_sample_order)
        self.samples.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.samples_index, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")

    def read_samples(self) -> list[dict[str, Any]]:
        """The entries of `samples/index.json`; empty when there are none yet."""
        try:
            rows = json.loads(self.samples_index.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as exc:
            raise FlashGRPOError(
                f"{str(self.samples_index)!r} cannot be read: {exc}; delete it, it is rebuilt by "
                "the next evaluation"
            ) from exc
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process; the system lets go of it however the process ends.

        Raises:
            FlashGRPOError: another process (or another trainer in this one) holds it.
        """
        fence.check(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.lock_path, "a+b") as file:
            if not _try_lock(file):
                raise FlashGRPOError(
                    f"run {self.name!r} is being trained by another process: stop that one, or "
                    "choose another run name"
                )
            try:
                # A worker that takes the run over recognises the lock of the one it replaces.
                file.truncate(0)
                file.write(fence.holder().encode())
                file.flush()
                yield
            finally:
                _unlock(file)


def _sample_key(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(entry.get(key)) for key in ("iteration", "split", "prompt", "seed"))


def _sample_order(entry: dict[str, Any]) -> tuple[int, str, str]:
    # File names carry the prompt's place in its file.
    return int(entry.get("iteration") or 0), str(entry.get("split")), str(entry.get("file"))


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        import errno

        # A network file system without locks must not make training impossible.
        return exc.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
    return True


def _unlock(file: IO[bytes]) -> None:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    except OSError:
        pass  # closing the file lets go of it as well


def runs_root(output: str | Path) -> Path:
    """The folder that holds all runs of `output`."""
    return Path(output) / "flashgrpo" / "runs"


def list_runs(output: str | Path) -> list[RunFolder]:
    """All runs under `output`, by name; folders that are no runs are left out."""
    runs = []
    try:
        names = sorted(entry.name for entry in runs_root(output).iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []
    for name in names:
        try:
            run = RunFolder(output, name)
        except FlashGRPOError:
            continue  # a folder someone put here; it cannot be a run
        if run.exists():
            runs.append(run)
    return runs


def free_name(output: str | Path, name: str) -> str:
    """`name` when no run has it, else `name-2`, `name-3`, ... (cut to 64 characters)."""
    check_run_name(name)
    candidate, number = name, 1
    while (runs_root(output) / candidate).exists():
        number += 1
        tail = f"-{number}"
        candidate = name[: 64 - len(tail)] + tail
    return candidate
