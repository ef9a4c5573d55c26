"""`kill -9` at random moments of a training, then resume: the same bytes as without.

    python tests/soak/kill_matrix.py                      # 30 kills, writes results/kill_matrix.json
    python tests/soak/kill_matrix.py --points write rename --each 1

Each case trains the embedded tiny Wan through the real command line in a process of its own, which
is killed by SIGKILL while it does the chosen thing:

* rollout, decode, score, backward: at a random moment inside a randomly chosen call;
* write: between writing a file and syncing it; a new file is first cut at a random byte, as after
  a power failure, and a log inside its last line;
* rename: right before or right after a file or checkpoint gets its name.

Then the run is resumed, undisturbed, and compared with a run that was never killed: the LoRA, every
file of the last checkpoint, and no temporary file left. The moments are drawn from `--seed`, the
phase of each kill is the one that the killed process has logged itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "kill_matrix.json"
POINTS = ("rollout", "decode", "score", "backward", "write", "rename")
ITERATIONS = 3

TABLES: dict[str, dict[str, Any]] = {
    "model": {"transformer": "tiny", "device": "cpu"},
    "rollout": {"group_size": 2, "prompts_per_iteration": 2, "micro_batch": 2},
    "eval": {"every": 3, "prompts": 1, "seeds": 1, "test_prompts": 0},
    "optim": {"learning_rate": 1e-3, "warmup": 0},
    "run": {"name": "run", "iterations": ITERATIONS, "threads": 1, "save_every": 1, "keep": 1},
}


class Probe:
    """Knows what the process is doing, counts it, and kills it at the chosen moment."""

    def __init__(self, log: Path, target: tuple[str, int] | None, rng: random.Random) -> None:
        self.log = log
        self.target = target
        self.rng = rng
        self.calls: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        self.phase, self.iteration = "", 0
        self.stack: list[str] = []
        self.durations: dict[str, float] = {}

    def reached(self, point: str) -> bool:
        self.calls[point] += 1
        return self.target == (point, self.calls[point])

    def die(self, moment: str) -> None:
        """Log where the process is, and end it as `kill -9` does."""
        record = {
            "phase": self.phase,
            "iteration": self.iteration,
            "doing": list(self.stack),
            "moment": moment,
        }
        with open(self.log, "w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        os.kill(os.getpid(), signal.SIGKILL)

    def _later(self, delay: float) -> None:
        time.sleep(delay)
        self.die(f"{delay:.3f} s into it")

    @contextmanager
    def at(self, point: str) -> Iterator[None]:
        self.stack.append(point)
        started = time.monotonic()
        if self.reached(point):
            delay = self.rng.uniform(0, self.durations[point])
            threading.Thread(target=self._later, args=(delay,), daemon=True).start()
        try:
            yield
        finally:
            self.stack.pop()
            self.seconds[point] += time.monotonic() - started

    def during(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.at(point):
                return function(*args, **kwargs)

        return wrapped

    def fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def wrapped(handle: int) -> None:
            self.stack.append("write")
            if self.reached("write"):
                self.die(tear(handle, self.rng))
            real(handle)
            self.stack.pop()

        return wrapped

    def rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def wrapped(source: Any, target: Any, **kwargs: Any) -> None:
            self.stack.append("rename")
            chosen = self.reached("rename")
            after = chosen and self.rng.random() < 0.5
            name = Path(target).name
            if chosen and not after:
                self.die(f"before {name} got its name")
            real(source, target, **kwargs)
            if after:
                self.die(f"after {name} got its name")
            self.stack.pop()

        return wrapped


def tear(handle: int, rng: random.Random) -> str:
    """Take away what a power failure could: part of a new file, part of a log's last line."""
    path = Path(os.readlink(f"/proc/self/fd/{handle}"))
    if path.is_dir():
        return f"before folder {path.name} was synced"
    size = path.stat().st_size
    first = 0
    if path.suffix == ".jsonl":
        first = path.read_bytes().rstrip(b"\n").rfind(b"\n") + 1
    keep = rng.randint(first, size)
    with open(path, "r+b") as file:
        file.truncate(keep)
    return f"{keep} of {size} bytes of {path.name} written"


def install(probe: Probe) -> None:
    """Let the probe see every call of what can be killed."""
    import torch

    from flashgrpo_core import scoring
    from flashgrpo_core.progress import TerminalControl
    from flashgrpo_core.rewards.mix import RewardMix
    from flashgrpo_core.wan.transformer import WanTransformer3DModel

    def patch(place: Any, name: str, make: Callable[..., Any]) -> None:
        setattr(place, name, make(getattr(place, name)))

    def forward(real: Callable[..., Any]) -> Callable[..., Any]:
        sampled = probe.during("rollout", real)
        return lambda *a, **k: (sampled if probe.phase == "rollout" else real)(*a, **k)

    def phase(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(control: Any, name: str, total: int, iteration: int = 0) -> None:
            probe.phase, probe.iteration = name, iteration
            real(control, name, total, iteration)

        return wrapped

    patch(TerminalControl, "phase", phase)
    patch(WanTransformer3DModel, "forward", forward)
    patch(scoring, "decode_latents", lambda f: probe.during("decode", f))
    patch(RewardMix, "measure", lambda f: probe.during("score", f))
    patch(torch.Tensor, "backward", lambda f: probe.during("backward", f))
    patch(os, "fsync", probe.fsync)
    patch(os, "rename", probe.rename)
    patch(os, "replace", probe.rename)


def in_child(work: Callable[[], None], log: Path) -> int:
    """Run `work` in a forked process (its imports are there already); returns its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def train(job: Path) -> None:
    """`flashgrpo train JOB`, as a user types it."""
    from flashgrpo_core.cli import main

    code = main(["train", str(job)])
    if code != 0:
        raise SystemExit(code)


def make_job(folder: Path) -> Path:
    from flashgrpo_core.config_io import build_config, dump_toml

    folder.mkdir(parents=True)
    tables = {name: dict(values) for name, values in TABLES.items()}
    tables["run"]["output"] = str(folder / "output")
    job = folder / "job.toml"
    job.write_text(dump_toml(build_config(tables)), encoding="utf-8")
    return job


def result_of(folder: Path) -> dict[str, str]:
    """SHA-256 of everything that must not depend on kills."""
    run = folder / "output" / "flashgrpo" / "runs" / "run"
    files = [*run.glob("lora/*.safetensors"), *run.glob(f"checkpoints/{ITERATIONS:06d}/*")]
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def left_overs(folder: Path) -> list[str]:
    output = folder / "output"
    return [
        str(path.relative_to(output))
        for path in output.rglob(".*")
        if path.name != ".lock"  # held by the system, not by its existence
    ]


def last_iterations(folder: Path) -> list[int]:
    from flashgrpo_core.runs.events import latest_each, read_events

    events = read_events(folder / "output" / "flashgrpo" / "runs" / "run" / "events.jsonl")
    return [e["iteration"] for e in latest_each(events, "iteration")]


def one_case(
    number: int, point: str, reference: dict[str, Any], scratch: Path, seed: int
) -> dict[str, Any]:
    """Kill one training and resume it; raises when anything is not as it must be."""
    rng = random.Random(f"{seed}/{number}/{point}")
    call = rng.randint(1, reference["calls"][point])
    folder = scratch / f"{number:02d}_{point}"
    job = make_job(folder)
    # Prompt embeddings are shared by runs; encoding them is no part of a case.
    shutil.copytree(reference["cache"], folder / "output" / "flashgrpo" / "cache")
    killed, log = folder / "killed.json", folder / "log.txt"

    def disturbed() -> None:
        probe = Probe(killed, (point, call), rng)
        probe.durations = reference["durations"]
        install(probe)
        train(job)

    status = in_child(disturbed, log)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        raise AssertionError(f"case {number} was not killed:\n{log.read_text()[-3000:]}")
    where = json.loads(killed.read_text())
    torn = len(left_overs(folder))
    if in_child(lambda: train(job), log) != 0:
        raise AssertionError(f"case {number} does not resume:\n{log.read_text()[-3000:]}")
    found = result_of(folder)
    case = {
        "case": number,
        "point": point,
        "call": f"{call} of {reference['calls'][point]}",
        **where,
        "temporary_files_after_kill": torn,
        "equal": found == reference["result"],
        "temporary_files_left": left_overs(folder),
    }
    complete = last_iterations(folder) == list(range(1, ITERATIONS + 1))
    if not case["equal"] or case["temporary_files_left"] or not complete:
        differs = {
            k for k in found | reference["result"] if found.get(k) != reference["result"].get(k)
        }
        raise AssertionError(f"case {case}: differs in {sorted(differs)}, kept in {folder}")
    shutil.rmtree(folder)
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--each", type=int, default=5, help="kills per point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scratch", type=Path, help="folder for the runs (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path, help="JSON of all cases")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["OMP_NUM_THREADS"] = "1"  # nothing may run threads before a fork

    import flashgrpo_core.training  # noqa: F401  imported once, shared by all forks

    scratch = args.scratch or Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    started = time.monotonic()
    whole = scratch / "undisturbed"
    job = make_job(whole)
    counts = scratch / "counts.json"

    def undisturbed() -> None:
        probe = Probe(scratch / "none", None, random.Random(0))
        install(probe)
        train(job)
        counts.write_text(json.dumps({"calls": probe.calls, "seconds": probe.seconds}))

    if in_child(lambda: train(job), scratch / "log.txt") != 0:
        raise SystemExit((scratch / "log.txt").read_text()[-3000:])
    result = result_of(whole)
    cache = scratch / "cache"
    shutil.copytree(whole / "output" / "flashgrpo" / "cache", cache)
    shutil.rmtree(whole / "output" / "flashgrpo" / "runs")
    if in_child(undisturbed, scratch / "log.txt") != 0:
        raise SystemExit((scratch / "log.txt").read_text()[-3000:])
    if result_of(whole) != result or len(result) < 6:
        raise SystemExit("two undisturbed runs differ: nothing can be compared with them")
    measured = json.loads(counts.read_text())
    reference = {
        "calls": measured["calls"],
        "durations": {k: v / measured["calls"][k] for k, v in measured["seconds"].items()},
        "result": result,
        "cache": cache,
    }
    cases = []
    for number in range(args.each * len(args.points)):
        point = args.points[number % len(args.points)]
        cases.append(one_case(number, point, reference, scratch, args.seed))
        print(json.dumps(cases[-1]), flush=True)
    summary = {
        "kills": len(cases),
        "per_point": {p: sum(c["point"] == p for c in cases) for p in args.points},
        "equal": sum(c["equal"] for c in cases),
        "temporary_files_left": sum(len(c["temporary_files_left"]) for c in cases),
        "files_compared": sorted(result),
        "seconds": round(time.monotonic() - started),
        "seed": args.seed,
        "iterations": ITERATIONS,
    }
    print(json.dumps(summary, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"summary": summary, "cases": cases}, indent=1) + "\n")
    if not args.scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
