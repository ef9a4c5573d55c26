"""The queue of jobs as plain files, for any number of submitters and workers on a shared folder.

    <output>/flashgrpo/queue/
      00000012/                 one job; the number is its place in the queue
        job.json                what is to be trained
        lease-000003-<owner>    who has it: exactly one such file exists; owner `waiting` is nobody
        cancel, finish          wishes of the user
        preview.jpg             newest video
        result.json             how it ended
      workers/<name>.json       one heartbeat per running worker

A job changes hands by renaming its lease file to the next generation, which on every file system
only one of several can do. Clocks of different machines are never compared: a heartbeat is content
that changes, and who watches it measures with a clock of his own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config_io import check_run_name
from ..errors import FlashGRPOError
from ..files import write_text_atomic
from .events import jsonable, utc_now
from .job import Job, Tables, read_job

#: Seconds between two heartbeats.
BEAT = 1.0
#: Seconds without a heartbeat after which a worker counts as dead.
LEASE = 60.0
#: Finished jobs that are kept for reference.
KEPT = 200

_NUMBER = re.compile(r"\d{8}")
_LEASE = re.compile(r"lease-(\d{6})-([A-Za-z0-9._-]{1,100})")
_WAITING = "waiting"


@dataclass(frozen=True)
class Lease:
    """Who has a job.

    Attributes:
        path: the lease file.
        generation: fencing token; each change of hands raises it by one.
        owner: the worker, or `waiting`.
    """

    path: Path
    generation: int
    owner: str

    @property
    def free(self) -> bool:
        """Whether nobody has the job."""
        return self.owner == _WAITING

    @property
    def name(self) -> str:
        """`<job>/<file>`: unlike every other lease, past and future."""
        return f"{self.path.parent.name}/{self.path.name}"

    def pass_to(self, owner: str) -> Lease | None:
        """Give the job to another owner; None when someone else was faster.

        Args:
            owner: the worker that takes it.
        """
        target = self.path.with_name(f"lease-{self.generation + 1:06d}-{owner}")
        try:
            os.rename(self.path, target)
        except OSError:
            # A server that lost its answer reports a rename that was done as impossible.
            if not target.exists():
                return None
        return Lease(target, self.generation + 1, owner)

    def free_it(self) -> None:
        """Give the job back to the queue, where it keeps its place."""
        self.pass_to(_WAITING)

    def held(self) -> bool:
        """Whether it is still ours. Opening asks the server of a network folder, too."""
        try:
            os.close(os.open(self.path, os.O_WRONLY))
        except OSError:
            return False
        return True

    def beat(self, record: Mapping[str, Any]) -> bool:
        """Write a heartbeat with what the worker does; False when the lease is gone."""
        return _overwrite(self.path, record)

    def read(self) -> bytes:
        """The last heartbeat as it stands in the file."""
        with suppress(OSError):
            return self.path.read_bytes()
        return b""


class Entry:
    """One job in the queue.

    Args:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.preview = path / "preview.jpg"

    def job(self) -> Job:
        """What is to be trained.

        Raises:
            FlashGRPOError: the job file is not usable.
        """
        return read_job(self.path / "job.json")

    def lease(self) -> Lease | None:
        """Who has it; None for a moment while it changes hands, or when its folder is gone."""
        with suppress(OSError):
            for name in sorted(os.listdir(self.path), reverse=True):
                match = _LEASE.fullmatch(name)
                if match:
                    return Lease(self.path / name, int(match[1]), match[2])
        return None

    def result(self) -> dict[str, Any] | None:
        """How it ended (`status` finished, stopped or failed, `reason`), or None."""
        try:
            record = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return None  # being replaced on a network folder: the next look finds it whole
        return record if isinstance(record, dict) else None

    def end(self, status: str, **fields: Any) -> None:
        """Write how it ended."""
        record = {"status": status, "time": utc_now()} | jsonable(fields)
        text = json.dumps(record, ensure_ascii=False, indent=1, allow_nan=False)
        write_text_atomic(self.path / "result.json", text + "\n")

    def progress(self) -> dict[str, Any]:
        """What the worker says about itself in its last heartbeat; empty when nothing yet."""
        lease = self.lease()
        if lease is None or lease.free:
            return {}
        try:
            record = json.loads(lease.read())
        except ValueError:
            return {}  # read while it was written
        return record if isinstance(record, dict) else {}

    def cancel(self) -> None:
        """Ask to stop; a job that nobody has yet ends at once."""
        _flag(self.path / "cancel")
        lease = self.lease()
        if lease is not None and lease.free and lease.pass_to("cancelled") is not None:
            self.end("stopped", reason="cancelled before a worker took it")

    def cancelled(self) -> bool:
        """Whether the user asked to stop."""
        return (self.path / "cancel").exists()

    def finish(self) -> None:
        """Ask to end well after the current iteration."""
        _flag(self.path / "finish")

    def finishing(self) -> bool:
        """Whether the user asked to end well."""
        return (self.path / "finish").exists()


class Queue:
    """The queue of one output folder.

    Args:
        output: the folder that holds `flashgrpo/runs`.
    """

    def __init__(self, output: str | Path) -> None:
        self.path = Path(output) / "flashgrpo" / "queue"
        self.workers_path = self.path / "workers"
        self._ended: set[str] = set()

    def submit(self, version: str, run: str, config: Tables, embeddings: str = "") -> Entry:
        """Add a job behind all others.

        Args:
            version: version of the package that submits.
            run: name of the run.
            config: its configuration, as `job.portable` makes it.
            embeddings: file of ready prompt embeddings in the run folder.

        Raises:
            FlashGRPOError: the folder cannot be written.
        """
        check_run_name(run)
        job = Job(secrets.token_hex(16), version, run, config, embeddings)
        draft = self.path / f".new-{secrets.token_hex(8)}"
        try:
            draft.mkdir(parents=True)
            write_text_atomic(draft / "job.json", job.text(utc_now()))
            _flag(draft / f"lease-000000-{_WAITING}")
            while True:
                numbers = [int(entry.name) for entry in self.entries()]
                target = self.path / f"{max(numbers, default=0) + 1:08d}"
                try:
                    # A folder with files in it is never replaced: a number is given once.
                    os.rename(draft, target)
                except OSError:
                    if not target.exists():
                        raise
                    continue
                break
        except OSError as exc:
            raise FlashGRPOError(
                f"the queue {str(self.path)!r} cannot be written: {exc.strerror or exc}; check "
                "free space and access"
            ) from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._prune()
        return Entry(target)

    def entries(self) -> list[Entry]:
        """All jobs, the oldest first."""
        try:
            names = sorted(name for name in os.listdir(self.path) if _NUMBER.fullmatch(name))
        except FileNotFoundError:
            return []
        return [Entry(self.path / name) for name in names]

    def open(self) -> list[Entry]:
        """The jobs that have not ended, the oldest first."""
        found = [entry for entry in self.entries() if entry.name not in self._ended]
        # An end is for ever, and there can be many.
        self._ended |= {entry.name for entry in found if entry.result() is not None}
        return [entry for entry in found if entry.name not in self._ended]

    def active(self, run: str) -> Entry | None:
        """The open job of a run, or None."""
        for entry in self.open():
            with suppress(FlashGRPOError):
                if entry.job().run == run:
                    return entry
        return None

    def workers(self) -> dict[str, bytes]:
        """Heartbeat files of the workers by name; those of dead ones stay for a while."""
        found = {}
        with suppress(OSError):
            for path in sorted(self.workers_path.glob("*.json")):
                with suppress(OSError):
                    found[path.stem] = path.read_bytes()
        return found

    def _prune(self) -> None:
        """Delete the oldest jobs that have ended. The newest stays: its number is the last given."""
        ended = [entry for entry in self.entries() if entry.result() is not None]
        for entry in ended[: max(0, len(ended) - KEPT)]:
            shutil.rmtree(entry.path, ignore_errors=True)


class Watch:
    """Tells what is alive by what changes, by this process's own clock.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[bytes, float, int]] = {}

    def look(self, key: str, content: bytes) -> tuple[float, bool]:
        """Look at something once more.

        Args:
            key: what it is.
            content: how it looks now.

        Returns:
            Seconds since it was last seen to change (0 the first time), and whether it was ever
            seen to change.
        """
        now = self._clock()
        before = self._seen.get(key)
        if before is None:
            self._seen[key] = (content, now, 0)
        elif before[0] != content:
            self._seen[key] = (content, now, before[2] + 1)
        _, since, changes = self._seen[key]
        return now - since, changes > 0

    def forget(self, keep: set[str]) -> None:
        """Forget what is no longer there."""
        for key in self._seen.keys() - keep:
            del self._seen[key]


def write_heartbeat(path: Path, record: Mapping[str, Any]) -> bool:
    """Write the heartbeat file of a worker, making it when it is not there."""
    if _overwrite(path, record):
        return True
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _flag(path)
    return _overwrite(path, record)


def _overwrite(path: Path, record: Mapping[str, Any]) -> bool:
    """Replace the content of an existing file in place; False when it is not there."""
    data = json.dumps(jsonable(dict(record)), ensure_ascii=False).encode()
    try:
        handle = os.open(path, os.O_WRONLY | getattr(os, "O_BINARY", 0))
    except OSError:
        return False
    try:
        os.write(handle, data)
        os.ftruncate(handle, len(data))
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _flag(path: Path) -> None:
    with open(path, "ab"):
        pass
