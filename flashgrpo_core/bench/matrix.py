"""Runs the cells of the matrix: processes of their own, as many at a time as asked, resumable."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config_io import dump_toml
from ..errors import Cancelled, FlashGRPOError
from ..files import write_text_atomic
from ..runs.folder import RunFolder
from .arms import ARMS, LEVELS, Cell, Sizes, cell_config, cell_key
from .measure import measure_run

Record = dict[str, Any]

#: Seconds between looks at the running processes.
POLL = 0.2

#: Evaluations of each part by which a run is extended.
EXTENSION = 4


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    sizes: Sizes,
    jobs: int,
    say: Callable[[str], None],
) -> list[Record]:
    """Run what is not done yet; returns the record of every cell, in order.

    A finished cell is a small file in `folder/cells`; its run folder is removed. An unfinished run
    goes on where it stopped.

    Args:
        cells: what to run.
        folder: folder of the bench.
        sizes: how large the runs are.
        jobs: processes at a time.
        say: told about each cell that ends.

    Raises:
        FlashGRPOError: a run failed; its log is named.
        Cancelled: interrupted; call again to go on.
    """
    waiting = [cell for cell in cells if read_cell(cell, folder, sizes) is None]
    total, running = len(waiting), {}  # type: int, dict[Cell, _Process]
    started = time.monotonic()
    # A scheduler's or a shell's "please end" is a Ctrl-C: the runs must not stay behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                running[cell] = _Process(cell, folder, sizes)
            time.sleep(POLL)
            for cell, process in list(running.items()):
                record = process.look()
                if record is None:
                    continue
                del running[cell]
                done = total - len(waiting) - len(running)
                left = (time.monotonic() - started) / done * (total - done)
                say(
                    f"{done}/{total} {cell.name}: held-out reward {record['curve'][0]['reward']:.3f} "
                    f"to {record['curve'][-1]['reward']:.3f}, about {left / 60:.0f} min left"
                )
    except KeyboardInterrupt:
        raise Cancelled from None
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running.values():
            process.stop()
    records = [read_cell(cell, folder, sizes) for cell in cells]
    return [record for record in records if record is not None]


def read_cell(cell: Cell, folder: Path, sizes: Sizes) -> Record | None:
    """The record of a finished cell, None when there is none of these settings."""
    try:
        record: Record = json.loads(_record_path(cell, folder).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise FlashGRPOError(
            f"{str(_record_path(cell, folder))!r} cannot be read ({exc}): delete it to run it again"
        ) from None
    return record if record.get("settings") == cell_key(cell, sizes) else None


def _record_path(cell: Cell, folder: Path) -> Path:
    return folder / "cells" / f"{cell.name}{'-tuning' if cell.tuning else ''}.json"


@functools.cache
def code_digest() -> str:
    """A hash of the package's Python files: which code a run was made with."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class _Process:
    """A cell that runs."""

    def __init__(self, cell: Cell, folder: Path, sizes: Sizes) -> None:
        self.cell, self.folder, self.sizes = cell, folder, sizes
        kind = cell_key(cell, sizes)
        self.output = str((folder / "work" / kind).absolute())
        self.run = RunFolder(self.output, cell.name)
        jobs = folder / "work" / "jobs"
        jobs.mkdir(parents=True, exist_ok=True)
        self.job = jobs / f"{cell.name}-{kind}.toml"
        self.log = self.job.with_suffix(".log")
        self._start(sizes.tuning if cell.tuning else sizes.common)

    def _start(self, forwards: float) -> None:
        """Train until so many forwards are spent; a run that has spent some goes on."""
        config = cell_config(self.cell, self.output, self.sizes, forwards)
        write_text_atomic(self.job, dump_toml(config))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flashgrpo_core", "train", str(self.job.absolute())],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                # One thread each: the same bits on every machine, and times that can be compared.
                env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                cwd=Path(__file__).resolve().parents[2],
            )

    def stop(self) -> None:
        """Let the run save and end."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def look(self) -> Record | None:
        """The record once the cell is done, None before; starts its next part where it has one."""
        status = self.process.poll()
        if status is None:
            return None
        found = measure_run(self.run)
        if (status or self.run.status() != "finished") and not found["diverged"]:
            raise FlashGRPOError(
                f"run {self.cell.name} ended with status {status}: see {str(self.log)!r}; the others "
                "are kept, run the same command again"
            )
        spent = found["curve"][-1]["forwards"]
        reached = max(point["reward"] for point in found["curve"]) >= max(LEVELS)
        goes_on = (
            ARMS[self.cell.arm].extended
            and not self.cell.tuning
            and not reached
            and not found["diverged"]
        )
        if goes_on and spent + self.sizes.between <= self.sizes.budget:
            self._start(min(spent + EXTENSION * self.sizes.between, self.sizes.budget))
            return None
        record = {
            "arm": self.cell.arm,
            "learning_rate": self.cell.learning_rate,
            "seed": self.cell.seed,
            "tuning": self.cell.tuning,
            "settings": cell_key(self.cell, self.sizes),
            "code": code_digest(),
            **found,
        }
        path = _record_path(self.cell, self.folder)
        path.parent.mkdir(exist_ok=True)
        write_text_atomic(path, json.dumps(record) + "\n")
        shutil.rmtree(self.output, ignore_errors=True)
        return record
