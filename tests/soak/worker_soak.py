"""Workers that are killed and stopped at random: ``python tests/soak/worker_soak.py``.

Twenty jobs of equal settings and seed go through two workers that are killed at random moments and
started again. Then jobs whose worker is stopped past its lease and continued after another one has
taken over. What must hold: every job ends once, none is lost, they are claimed in order, every LoRA
has the same bytes, a worker that wakes up writes nothing, and no temporary file is left.

The last figures are in `results/worker_soak.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from flashgrpo_core.runs.queue import Entry, Queue  # noqa: E402
from tests.worker_process import WorkerProcess, events, submit, wait_until  # noqa: E402

FIGURES = Path(__file__).parent / "results" / "worker_soak.json"


def tree(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def left_over(folder: Path) -> list[str]:
    """Temporary files below a folder."""
    names = (".tmp-", ".trash-", ".old-", ".new-")
    return [
        str(path)
        for path in folder.rglob("*")
        if path.name.startswith(names) or ".tmp" in path.name
    ]


def check_runs(output: Path, entries: list[Entry]) -> str:
    """Every job ended once and well, with the same LoRA; returns its SHA-256."""
    digests = set()
    for entry in entries:
        run = entry.job().run
        result = entry.result()
        assert result and result["status"] == "finished", (run, result)
        ends = [e for e in events(output, run) if e["event"] == "run_finished"]
        assert [e["status"] for e in ends] == ["finished"], (run, ends)
        (lora,) = result["lora"]
        path = output / "flashgrpo" / "runs" / run / "lora" / lora
        from flashgrpo_core.files import open_tensors

        file, digest = open_tensors(path), hashlib.sha256()
        for key in file.keys():  # the header names the run
            digest.update(key.encode() + file.get(key).numpy().tobytes())
        digests.add(digest.hexdigest())
    assert len(digests) == 1, f"{len(digests)} different LoRAs of equal runs"
    return digests.pop()


def claims(output: Path, entries: list[Entry]) -> list[dict[str, Any]]:
    """The first claim of each job."""
    return [
        next(e for e in events(output, entry.job().run) if e["event"] == "job") for entry in entries
    ]


def start(output: Path, count: int = 2) -> list[WorkerProcess]:
    """Start workers `w0`, `w1`, ..."""
    return [WorkerProcess(output, f"w{n}") for n in range(count)]


def killed(
    output: Path, running: list[WorkerProcess], jobs: int, kills: int, draw: random.Random
) -> dict[str, Any]:
    """Random kills while a queue is worked off; killed workers are started again."""
    entries = [submit(output, f"killed-{number:02d}") for number in range(jobs)]
    done, phases, started = 0, {}, time.monotonic()
    while any(entry.result() is None for entry in entries):
        if done < kills:
            time.sleep(draw.uniform(0.0, 2.0))
            at_work = {}
            for entry in entries:
                lease, doing = entry.lease(), entry.progress().get("phase")
                if lease and doing and entry.result() is None:
                    at_work[int(lease.owner.partition(".")[0][1:])] = str(doing)
            # One that has been killed still holds its lease for a while.
            at_work = {n: doing for n, doing in at_work.items() if running[n].has_taken()}
            if at_work:
                victim = draw.choice(sorted(at_work))
                running[victim].kill()
                phases[at_work[victim]] = phases.get(at_work[victim], 0) + 1
                running[victim] = WorkerProcess(output, f"w{victim}")
                done += 1
        else:
            time.sleep(0.2)
        assert time.monotonic() - started < 1800, "the queue is not worked off"
    seconds = time.monotonic() - started
    first = claims(output, entries)
    # A worker that was killed right after a claim has not logged it.
    first = [e for e in first if e["generation"] == 1]
    assert len(first) >= jobs - kills
    assert first == sorted(first, key=lambda e: e["claimed"]), "claimed out of order"
    takeovers = sum(
        sum(e["event"] == "job" for e in events(output, entry.job().run)) - 1 for entry in entries
    )
    return {
        "jobs": jobs,
        "workers": len(running),
        "kills": done,
        "killed_in_phase": dict(sorted(phases.items())),
        "takeovers": takeovers,
        "seconds": round(seconds),
        "lora_sha256": check_runs(output, entries),
    }


def stopped(
    output: Path, running: list[WorkerProcess], trials: int, draw: random.Random
) -> dict[str, Any]:
    """A worker is stopped past its lease, and continued when another one has ended its job."""
    entries, phases = [], {}
    for trial in range(trials):
        entry = submit(output, f"stopped-{trial:02d}")
        entries.append(entry)
        folder = output / "flashgrpo" / "runs" / entry.job().run
        wait_until(lambda entry=entry: entry.progress().get("phase"), 300, "the training")
        time.sleep(draw.uniform(0.0, 0.5))
        lease = entry.lease()
        assert lease is not None
        owner = running[int(lease.owner.partition(".")[0][1:])]
        owner.send(signal.SIGSTOP)
        doing = "ended" if entry.result() else str(entry.progress().get("phase"))
        phases[doing] = phases.get(doing, 0) + 1
        wait_until(entry.result, 300, "the take-over")
        before = tree(folder)
        owner.send(signal.SIGCONT)
        time.sleep(2.5)
        assert tree(folder) == before, "a worker wrote after its lease was gone"
        assert owner.process.poll() is None, owner.log()
    return {
        "trials": trials,
        "stopped_in_phase": dict(sorted(phases.items())),
        "lora_sha256": check_runs(output, entries),
    }


def main() -> None:
    """Run both and keep the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--stops", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        output = Path(name)
        running = start(output, args.workers)
        try:
            figures = {
                "killed": killed(output, running, args.jobs, args.kills, draw),
                "stopped": stopped(output, running, args.stops, draw),
            }
        finally:
            for worker in running:
                worker.stop()
        assert figures["killed"]["lora_sha256"] == figures["stopped"]["lora_sha256"]
        for part in ("runs", "queue"):
            assert not left_over(output / "flashgrpo" / part), left_over(output)
        assert not Queue(output).open()
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
