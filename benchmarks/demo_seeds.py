"""The demo over several seeds: does the held-out reward rise every time?

    python benchmarks/demo_seeds.py [--seeds 5] [--out DIR]

Each seed is a whole `flashgrpo demo` in a process of its own (about four minutes each on two CPU
cores). Prints a table and writes `benchmarks/results/demo_seeds.json`; exits with 1 unless every
seed's test interval lies above zero.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "demo_seeds.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", help="folder that keeps the runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = [
            run(seed, Path(args.out or temporary) / f"seed{seed}") for seed in range(args.seeds)
        ]
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


def run(seed: int, out: Path) -> dict[str, float]:
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
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    wall = time.monotonic() - started
    events = [
        json.loads(line)
        for line in (out / "flashgrpo" / "runs" / "demo" / "events.jsonl").read_text().splitlines()
    ]
    test = next(e for e in events if e["event"] == "evaluation" and e["split"] == "test")
    iterations = [e for e in events if e["event"] == "iteration"]
    return {
        "seed": seed,
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
