"""One job in the hands of a worker: heartbeats, the user's wishes, and taking over from the dead."""

from __future__ import annotations

import io
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, fence
from .config import Config
from .errors import Cancelled, FlashGRPOError
from .fence import LostLease, Released
from .files import write_bytes_atomic
from .progress import TerminalControl
from .runs.events import backwards
from .runs.folder import RunFolder
from .runs.job import SCHEMA, Job
from .runs.queue import BEAT, Entry, Lease, write_heartbeat
from .video import filmstrip


@dataclass(frozen=True)
class Taken:
    """A job that this worker has claimed.

    Attributes:
        entry: its place in the queue.
        lease: our lease.
        job: what is to be trained, or why the job file is unusable.
        claimed: when, UTC.
    """

    entry: Entry
    lease: Lease
    job: Job | FlashGRPOError
    claimed: str


class JobControl(TerminalControl):
    """Shows a job in the terminal and in its heartbeats, and obeys the wishes of its user.

    Args:
        entry: the job.
        config: its configuration.
        heart: the heartbeats.
        session: knows when the worker was asked to end.
    """

    def __init__(
        self, entry: Entry, config: Config, heart: Heart, session: TerminalControl
    ) -> None:
        super().__init__(config.run.iterations)
        self._entry, self._heart, self._session = entry, heart, session

    def phase(self, name: str, total: int, iteration: int = 0) -> None:
        """Start the bar of a phase."""
        super().phase(name, total, iteration)
        self._tell()
        self._heart.beat()  # a short phase would not be seen otherwise

    def tick(self, done: int = 1) -> None:
        """Move the bar."""
        super().tick(done)
        self._tell()

    def check(self) -> None:
        """Stop when the user cancelled, the worker is to end, or the job is another's."""
        if self._session.stop_requested:
            raise Released("the worker was asked to end")
        if self._heart.lost:
            raise LostLease("another worker has taken the job over")
        if self._entry.cancelled():
            raise Cancelled("cancelled in ComfyUI")

    def finish(self) -> bool:
        """Whether the user pressed "Finish now"."""
        return self._entry.finishing()

    def preview(self, video: np.ndarray, caption: str) -> None:
        """Put the newest video's frames beside the job."""
        buffer = io.BytesIO()
        filmstrip(video).convert("RGB").save(buffer, format="JPEG", quality=88)
        write_bytes_atomic(self._entry.preview, buffer.getvalue())

    def _tell(self) -> None:
        name, total, iteration = self._phase
        self._heart.phase = {
            "phase": name,
            "done": min(self._done, total),
            "total": total,
            "iteration": iteration,
        }


class Heart(threading.Thread):
    """Beats in the worker's own file and in the lease of its job.

    Args:
        path: the worker's own file.
        worker: its name in the queue.
        processes: how many train together.

    Attributes:
        phase: what the job is at.
        lost: whether the lease was found to be gone.
    """

    def __init__(self, path: Path, worker: str, processes: int) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._path, self._worker, self._processes = path, worker, processes
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._job = ""
        self._lease: Lease | None = None
        self._beats = 0
        self.phase: dict[str, Any] = {}
        self.lost = False

    def hold(self, entry: Entry, lease: Lease) -> None:
        """Beat for a job from now on."""
        with self._lock:
            self._job, self._lease, self.lost, self.phase = entry.name, lease, False, {}
        self.beat()

    def drop(self) -> None:
        """Beat for no job."""
        with self._lock:
            self._job, self._lease = "", None

    def beat(self) -> None:
        """Write both files once."""
        with self._lock:
            self._beats += 1
            record = {
                "schema": SCHEMA,
                "version": __version__,
                "worker": self._worker,
                "processes": self._processes,
                "beat": self._beats,
                "job": self._job,
                **self.phase,
            }
            if self._lease is not None and not self._lease.beat(record):
                self.lost = not self._lease.held()
        write_heartbeat(self._path, record)

    def run(self) -> None:
        """Beat until told to stop."""
        while not self._end.wait(BEAT):
            self.beat()

    def stop(self) -> None:
        """End, and leave no trace of a worker."""
        self._end.set()
        if self.is_alive():
            self.join()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def take_over(folder: RunFolder, entry: Entry) -> None:
    """Cut a run off from the worker that had it before; see `fence`.

    Args:
        folder: the run.
        entry: its job.
    """
    for path in [*folder.path.rglob(".*"), *entry.path.glob(".*")]:
        if path.name.startswith(".tmp-") or path.name.endswith(".tmp.mp4"):
            fence.check(path)
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(True)
    for path in (folder.events, folder.rewards):
        if path.exists():
            # The same lines in a new file: a handle from before leads nowhere.
            write_bytes_atomic(path, path.read_bytes())
    with suppress(OSError):  # on Windows a file that is locked cannot be read
        if folder.lock_path.read_text(encoding="utf-8").startswith(f"{entry.name}/lease-"):
            fence.check(folder.lock_path)
            folder.lock_path.unlink()


def end_of(folder: RunFolder, job: Job) -> dict[str, Any] | None:
    """How the run ended since this job was taken, as its log says; None when it has not."""
    last = None
    for record in backwards(folder.events):
        if record.get("event") == "run_finished":
            last = record
        elif record.get("event") == "job":
            return last if record.get("id") == job.id else None
    return None


def last_end(folder: RunFolder) -> dict[str, Any] | None:
    """The run's last `run_finished` event, or None."""
    return next((e for e in backwards(folder.events) if e.get("event") == "run_finished"), None)


def deaths(folder: RunFolder, job: Job, iteration: int, generation: int) -> int:
    """How many workers in a row have died over a job at this iteration.

    A worker that gives a job back raises the generation by two, one that dies by one.
    """
    count = 0
    for record in backwards(folder.events):
        if record.get("event") == "job":
            generation -= 1
            here = record.get("id") == job.id and record.get("iteration") == iteration
            if not here or record.get("generation") != generation:
                break
            count += 1
    return count
