"""Real `flashgrpo worker` processes, for tests and soak runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashgrpo_core import __version__
from flashgrpo_core.config_io import build_config
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.runs.job import portable
from flashgrpo_core.runs.queue import Entry, Queue

ROOT = Path(__file__).resolve().parents[1]
#: The shortest training there is: two iterations of two groups of two videos, nothing judged.
TABLES: dict[str, dict[str, Any]] = {
    "model": {"transformer": "tiny", "device": "cpu"},
    "schedule": {"steps": 4},
    "rollout": {"group_size": 2, "prompts_per_iteration": 2, "micro_batch": 2, "decode_batch": 4},
    "eval": {"every": 0, "test_prompts": 0},
    "optim": {"learning_rate": 1e-3, "warmup": 0},
    "run": {"iterations": 2, "seed": 3, "threads": 1},
}


class WorkerProcess:
    """One running worker.

    Args:
        output: the folder with the queue.
        name: name of the worker.
        command: how to start it; None is `flashgrpo worker` with the options of a test.
        launcher: put in front, e.g. of torchrun.
        options: further options.
    """

    def __init__(
        self,
        output: Path,
        name: str = "worker",
        *,
        command: Sequence[str] | None = None,
        launcher: Sequence[str] = ("-m",),
        options: Sequence[str] = (),
    ) -> None:
        if command is None:
            command = ["worker", "--runs", str(output), "--name", name, "--lease", "4", *options]
        full = [sys.executable, *launcher, "flashgrpo_core", *command]
        self.log_path = output / f"{name}-{time.monotonic_ns()}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                full, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def log(self) -> str:
        """What it has said."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def has_taken(self) -> bool:
        """Whether it has said that it trains a job."""
        return "job " in self.log()

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it the hard way."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 60.0) -> int:
        """Ask it to end; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def submit(output: Path, run: str, tables: dict[str, dict[str, Any]] | None = None) -> Entry:
    """Put a job into the queue."""
    merged = {table: dict(values) for table, values in TABLES.items()}
    for table, values in (tables or {}).items():
        merged.setdefault(table, {}).update(values)
    merged["run"] |= {"name": run, "output": str(output)}
    config = build_config(merged)
    return Queue(output).submit(__version__, run, portable(config, output, lambda kind, path: path))


def events(output: Path, run: str) -> list[dict[str, Any]]:
    """The log of a run."""
    return read_events(output / "flashgrpo" / "runs" / run / "events.jsonl")


def wait_until(condition: Any, timeout: float = 120.0, what: str = "it") -> Any:
    """Wait for a condition; returns its value."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {timeout:.0f} s"
        time.sleep(0.05)
    return value
