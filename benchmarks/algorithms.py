"""Do the other updates learn too? Each on the tiny Wan for the same number of forwards.

    python benchmarks/algorithms.py [--seeds 2] [--forwards 10000] [--only NAME ...] [--out DIR]

Per method and seed one whole run in a process of its own, then the test prompts, against the starting
policy from the same noise with a 95 % interval over prompts. A training forward and backward counts
as 3. Prints a table and writes `benchmarks/results/algorithms.json` (rows of methods that are not asked
for stay); exits with 1 unless every mean over seeds rises. This shows that the methods work, not which
is best: that is `flashgrpo bench`, which also gives each its own learning rate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks" / "results" / "algorithms.json"
TWICE = {"optim": {"updates_per_rollout": 2}}

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "flash": {},
    "nft": {"loss": {"algorithm": "nft"}, "rollout": {"noise": "independent"}},
    "nft, 2 updates": {
        "loss": {"algorithm": "nft"},
        "rollout": {"noise": "independent"},
        **TWICE,
    },
    "adaptive steps and prompts": {
        "schedule": {"adaptive": True},
        "loss": {"freeze_std": True},
        "prompts": {"sampling": "adaptive"},
    },
    "guard, 2 updates": {"loss": {"ratio": "guard", "clip": 1e-4}, **TWICE},
    "KL mask, 2 updates": {"loss": {"mask": "kl", "kl_threshold": 1e-4}, **TWICE},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--forwards", type=int, default=10000)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--out", help="folder that keeps the runs; finished ones are not made again"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args.one[0], int(args.one[1]), args.forwards, args.out)))
        return 0
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [r for r in rows if r["method"] not in args.only]
    with tempfile.TemporaryDirectory() as temporary:
        for method in args.only:
            for seed in range(args.seeds):
                command = [sys.executable, __file__, "--one", method, str(seed)]
                command += ["--forwards", str(args.forwards), "--out", args.out or temporary]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, text=True, env=environment
                )
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(
        "method                      seed  forwards  steps  base   trained  gain    95 % interval"
    )
    for r in rows:
        print(
            f"{r['method']:26s}  {r['seed']:4d}  {r['forwards']:8d}  {r['steps']:5d}  "
            f"{r['baseline']:.3f}  {r['reward']:.3f}    {r['gain']:+.3f}  "
            f"[{r['low']:+.3f}, {r['high']:+.3f}]"
        )
    gains = [[r["gain"] for r in rows if r["method"] == m] for m in args.only]
    return 0 if all(sum(g) > 0 for g in gains) else 1


def run(method: str, seed: int, forwards: int, out: str) -> dict[str, Any]:
    """Train one method with about so many forwards and judge it on the test prompts."""
    from flashgrpo_core.build import plan
    from flashgrpo_core.config_io import build_config
    from flashgrpo_core.runs.events import read_events
    from flashgrpo_core.training import train

    name = "".join(c if c.isalnum() else "-" for c in method) + f"-{seed}"
    tables: dict[str, dict[str, Any]] = {
        "model": {"transformer": "tiny"},
        "rollout": {"keep_graph": 0.0},  # a training forward counts as what it costs
        "optim": {"learning_rate": 1e-3, "warmup": 3},
        "eval": {"every": 0, "test_prompts": 12, "test_seeds": 2},
        "run": {"name": name, "output": out, "seed": seed, "threads": 1, "save_every": 100000},
    }
    for table, values in METHODS[method].items():
        tables[table] = tables.get(table, {}) | values
    planned = plan(build_config(tables))
    updates = tables["optim"].get("updates_per_rollout", 1)
    each = planned.forwards_per_iteration + 3 * updates * planned.train_forwards_per_iteration
    tables["run"]["iterations"] = max(2, round(forwards / each))
    result = train(build_config(tables))
    events = read_events(result.folder / "events.jsonl")
    last = [e for e in events if e["event"] == "iteration"][-1]
    test = [e for e in events if e["event"] == "evaluation" and e["split"] == "test"][-1]
    state = json.loads(
        next(
            iter(sorted((result.folder / "checkpoints").glob("*/checkpoint.json"))[-1:])
        ).read_text()
    )["state"]
    return {
        "method": method,
        "seed": seed,
        "forwards": last["forwards_total"],
        "steps": state["optimizer_steps"],
        "baseline": test["baseline_mean"],
        "reward": test["reward_mean"],
        "gain": test["difference"],
        "low": test["ci_low"],
        "high": test["ci_high"],
        "clip_fraction": last["clip_fraction"],
        "grad_norm": last["grad_norm"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
