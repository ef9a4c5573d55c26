"""What overlapping saves: the same run with a slow served reward, in sequence and overlapped.

    python benchmarks/overlap.py [--iterations 4] [--seconds 0.3]

A real reward server in a process of its own scores each video after a pause (`--seconds`), which
costs this machine nothing: a reward on another one. The runs must end with the same LoRA. Writes
`benchmarks/results/overlap.json`; figures are seconds of the rollout and score phases.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashgrpo_core.config_io import build_config  # noqa: E402
from flashgrpo_core.runs.events import read_events  # noqa: E402
from flashgrpo_core.training import train  # noqa: E402
from tests.unit._reward_server import ServerProcess  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "overlap.json"

#: The command line, with a reward that takes its time.
SLOW = """
import sys, time
from flashgrpo_core import cli
from flashgrpo_core.rewards import REWARDS
from flashgrpo_core.rewards.motion import MotionReward

class Slow(MotionReward):
    name = "slow"
    def __init__(self, seconds: float = 0.5):
        super().__init__()
        self.seconds = seconds
    def score(self, batch):
        time.sleep(self.seconds)
        return super().score(batch)

REWARDS["slow"] = Slow
sys.exit(cli.main(sys.argv[1:]))
"""


def one(overlap: bool, url: str, iterations: int, folder: Path) -> dict[str, Any]:
    """Train, and return seconds per phase after the first iteration and the LoRA's checksum."""
    name = "overlapped" if overlap else "in_sequence"
    config = build_config(
        {
            "model": {"transformer": "tiny", "device": "cpu"},
            "rollout": {"group_size": 4, "prompts_per_iteration": 4, "micro_batch": 2},
            "reward": {
                "terms": [{"name": "served", "url": url, "parallel": 1}],
                "overlap": overlap,
            },
            "eval": {"every": 0, "test_prompts": 0},
            "run": {
                "name": name,
                "output": str(folder),
                "iterations": iterations + 1,
                "threads": 1,
            },
        }
    )
    result = train(config)
    events = [e for e in read_events(result.folder / "events.jsonl") if e["iteration"] > 1]
    seconds = {
        phase: sum(e["seconds"] for e in events if e.get("name") == phase)
        for phase in ("rollout", "score")
    }
    adapter = result.folder / "checkpoints" / f"{iterations + 1:06d}" / "adapter.safetensors"
    lanes = [e["lanes"] for e in events if e["event"] == "timeline"]
    busy = {
        lane: sum(end - start for each in lanes for start, end in each[lane])
        for lane in ("sample", "decode", "wait", "score")
        if lanes
    }
    return {
        "rollout_phase": seconds["rollout"],
        "score_phase": seconds["score"],
        "both": sum(seconds.values()),
        "busy": busy,
        "adapter_sha256": hashlib.sha256(adapter.read_bytes()).hexdigest(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.3)
    args = parser.parse_args()
    option = f"seconds={args.seconds}"
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess("--reward", "slow", "--option", option, script=SLOW) as server,
    ):
        runs = {
            name: one(overlap, server.url, args.iterations, Path(folder))
            for name, overlap in (("in_sequence", False), ("overlapped", True))
        }
    plain, beside = runs["in_sequence"], runs["overlapped"]
    saved = 1 - beside["both"] / plain["both"]
    # Its own work one after the other: this holds on a busy machine too, where two runs differ.
    work = sum(beside["busy"][lane] for lane in ("sample", "decode", "score"))
    # The longer of the two kinds of work is the least it can take.
    least = max(beside["busy"]["sample"] + beside["busy"]["decode"], beside["busy"]["score"])
    result = {
        "iterations": args.iterations,
        "pause_per_video": args.seconds,
        "runs": runs,
        "saved": saved,
        "overlapped_work_in_sequence": work,
        "overlapped_over_own_work": beside["both"] / work,
        "overlapped_over_least_possible": beside["both"] / least,
        "same_lora": plain["adapter_sha256"] == beside["adapter_sha256"],
    }
    passed = result["same_lora"] and beside["both"] < min(plain["both"], work)
    result = json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 3))
    print(json.dumps({"passed": passed, **result}, indent=1))
    RESULTS.write_text(json.dumps({"passed": passed, **result}, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
