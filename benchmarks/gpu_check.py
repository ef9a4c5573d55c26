"""Check a machine with one CUDA GPU and no network: kernels, numerics, memory, time.

    python benchmarks/gpu_check.py [--wheels DIR] [--seconds 400] [--json FILE]

Wants the repository and torch. Packages that the machine lacks (diffusers for one) come as wheels in
a folder: `pip download --no-deps -d DIR diffusers peft accelerate ...` on another machine. Three
parts, each with its own failures and inside one budget of seconds, which begins before imports and
wheels; with the default and GRACE the whole ends within eight minutes:

1. `small`: the embedded tiny Wan on the GPU against the CPU, in fp32, bf16 and 8-bit storage, with
   swapped and recomputed blocks;
2. `1.3B`: random weights at the real shape, 480x832, as many frames as fit up to 81: seconds and
   peak memory of rollout, decode and update, with the exact savings and without;
3. `14B`: random weights in 8-bit storage, one iteration of a small video.

The table comes last; a row that failed or found no time says so. Exit code 1 when a row failed.
Without a GPU it says so and exits 0. `--cpu-dry-run` runs the same code at toy sizes on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE = 20  # seconds that a step may go on beyond the budget before the table is printed anyway


class OutOfTime(Exception):
    """The budget is used up."""


@dataclass
class Row:
    """One line of the table.

    `value` is a relative error or a count and `limit` what it may be at most; `seconds` and
    `peak_gib` are measured of a phase.
    """

    part: str
    what: str
    result: str = "ok"
    seconds: float | None = None
    peak_gib: float | None = None
    value: float | None = None
    limit: float | None = None


class Table:
    """The rows so far, and the time that is left."""

    def __init__(self, seconds: float) -> None:
        self.rows: list[Row] = []
        self.last = self.end = time.monotonic() + seconds

    def give(self, share: float) -> None:
        """Let the next part have a share of the time that is left."""
        now = time.monotonic()
        self.end = now + share * (self.last - now)

    def left(self) -> float:
        return self.end - time.monotonic()

    def check(self) -> None:
        if self.left() < 0:
            raise OutOfTime

    def add(self, row: Row) -> None:
        if row.value is not None and row.limit is not None and not row.value <= row.limit:
            row.result = "FAILED"
        self.rows.append(row)
        print(self.line(row), file=sys.stderr, flush=True)

    @staticmethod
    def line(row: Row) -> str:
        def shown(value: float | None, form: str) -> str:
            return "" if value is None else format(value, form)

        numbers = (
            f"{shown(row.seconds, '.2f'):>9} {shown(row.peak_gib, '.2f'):>8} "
            f"{shown(row.value, '.2e'):>9} {shown(row.limit, '.0e'):>7}"
        )
        return f"{row.part:<6} {row.what:<78} {numbers}  {row.result}"

    def show(self) -> None:
        head = f"{'seconds':>9} {'peak GiB':>8} {'value':>9} {'limit':>7}  result"
        print(f"\n{'part':<6} {'what':<78} {head}")
        for row in self.rows:
            print(self.line(row))
        sys.stdout.flush()


def install(wheels: Path) -> None:
    """Put packages that are missing here on the path, from wheels."""
    missing = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(str(wheel))
    if not missing:
        return
    target = tempfile.mkdtemp(prefix="gpu_check_")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*command, "--no-compile", "--target", target, *missing], check=True)
    sys.path.append(target)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of missing packages")
    parser.add_argument("--seconds", type=float, default=400, help="budget (default: 400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--cpu-dry-run", action="store_true", help="toy sizes, on the CPU")
    asked = parser.parse_args(argv)
    if asked.wheels and not asked.wheels.is_dir():
        parser.error(f"--wheels {asked.wheels}: there is no such folder")
    if asked.json and not asked.json.parent.is_dir():
        parser.error(f"--json {asked.json}: there is no folder {asked.json.parent}, make it first")
    return asked


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv)
    started = time.monotonic()
    import torch

    if not asked.cpu_dry_run and not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to check (--cpu-dry-run runs the code at toy sizes)")
        return 0
    if asked.wheels:
        install(asked.wheels)
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu_parts

    table = Table(asked.seconds - (time.monotonic() - started))

    def finish() -> None:
        table.show()
        if asked.json:
            asked.json.write_text(json.dumps([asdict(r) for r in table.rows], indent=1) + "\n")

    def give_up() -> None:
        table.add(Row("all", "a step took too long to stop", "FAILED"))
        finish()
        os._exit(1)

    timer = threading.Timer(max(table.left(), 0) + GRACE, give_up)
    timer.daemon = True
    timer.start()
    device = torch.device("cpu" if asked.cpu_dry_run else "cuda")
    parts = {
        gpu_parts.environment: 1.0,
        gpu_parts.small: 0.3,
        gpu_parts.real_1_3b: 0.7,
        gpu_parts.real_14b: 1.0,
    }
    for part, share in parts.items():
        try:
            table.give(share)
            table.check()
            part(table, device)
        except OutOfTime:
            table.add(Row(part.__name__, "the rest of this part", "no time left"))
        except Exception as exc:  # a failure is a row, and the other parts still run
            table.add(Row(part.__name__, f"{type(exc).__name__}: {exc}"[:160], "FAILED"))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    timer.cancel()
    finish()
    return int(any(row.result == "FAILED" for row in table.rows))


if __name__ == "__main__":
    raise SystemExit(main())
