"""The demo over several seeds: does the held-out reward rise every time?

    python benchmarks/demo_seeds.py [--seeds 5] [--jobs 1] [--out DIR]

Each seed is a whole `flashgrpo demo` in a process of its own, `--jobs` of them at a time, which share
the machine's cores. Prints a table and writes `benchmarks/results/demo_seeds.json`; exits with 1 unless every
seed's test interval lies above zero.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "demo_seeds.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="demos at a time")
    parser.add_argument("--out", help="folder that keeps the runs")
    args = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(args.out or temporary)
        jobs = [
            pool.submit(run, seed, folder / f"seed{seed}", threads) for seed in range(args.seeds)
        ]
        rows = [job.result() for job in jobs]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print("seed  base    trained  gain    95 % interval      gap closed  training s  peak GB")
    for r in rows:
        print(
            f"{r['seed']:4d}  {r['baseline']:.3f}   {r['reward']:.3f}    {r['gain']:+.3f}  "
            f"[{r['low']:+.3f}, {r['high']:+.3f}]   {r['gap_closed']:6.0%}      "
            f"{r['training_seconds']:6.0f}     {r['peak_memory_gb']:.2f}"
        )
    risen = sum(r["low"] > 0 for r in rows)
    print(f"{risen} of {len(rows)} seeds rise with the whole interval above zero")
    return 0 if risen == len(rows) else 1


def run(seed: int, out: Path, threads: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "flashgrpo_core",
        "demo",
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    started = time.monotonic()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, **quiet)
    wall = time.monotonic() - started
    events = [
        json.loads(line)
        for line in (out / "flashgrpo" / "runs" / "demo" / "events.jsonl").read_text().splitlines()
    ]
    test = next(e for e in events if e["event"] == "evaluation" and e["split"] == "test")
    iterations = [e for e in events if e["event"] == "iteration"]
    return {
        "seed": seed,
        "threads": threads,
        "baseline": test["baseline_mean"],
        "reward": test["reward_mean"],
        "gain": test["difference"],
        "low": test["ci_low"],
        "high": test["ci_high"],
        "gap_closed": test["difference"] / (1 - test["baseline_mean"]),
        "best_iteration": test["iteration"],
        "training_seconds": sum(e["seconds"] for e in iterations),
        "wall_seconds": wall,
        "forwards": iterations[-1]["forwards_total"],
        "peak_memory_gb": max(e["peak_memory"] for e in iterations) / 1e9,
    }


if __name__ == "__main__":
    raise SystemExit(main())
