"""Rollouts and LoRA of the same run on 1, 2 and 3 processes, and sharded on 2: all bits compared.

    python tests/soak/processes.py [--out tests/soak/results/processes.json]

Five iterations of the embedded tiny Wan with 3 groups of 3 videos in micro-batches of 2, which no
number of processes divides. Every rollout's recorded transition and finished latents are hashed on
the rank that made them; checkpoints are compared as files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ITERATIONS = 5
CASES = {"1": (1, False), "2": (2, False), "3": (3, False), "2 sharded": (2, True)}
FILES = ("adapter.safetensors", "ema.safetensors", "optimizer.safetensors")


def train_one(output: Path, noise: str, shard: bool) -> None:
    """One of the processes."""
    from flashgrpo_core.config_io import build_config
    from flashgrpo_core.distributed import World
    from flashgrpo_core.trainer import Trainer
    from flashgrpo_core.training import train

    world = World.launched(cpu=True)
    seen: dict[str, str] = {}
    rollout = Trainer.rollout

    def recorded(self: Trainer, groups: Any, iteration: int) -> Any:
        made = rollout(self, groups, iteration)
        for one in made:
            for i, sample in enumerate(one.samples):
                tensors = (one.latents_next[i], one.old_log_prob[i], one.final[i])
                digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors))
                seen[f"{iteration} {one.group.group_id} {sample}"] = digest.hexdigest()
        return made

    Trainer.rollout = recorded  # type: ignore[method-assign]
    config = build_config(
        {
            "model": {"transformer": "tiny", "device": "cpu", "shard": shard},
            "rollout": {
                "noise": noise,
                "prompts_per_iteration": 3,
                "group_size": 3,
                "micro_batch": 2,
            },
            "optim": {"learning_rate": 1e-3, "warmup": 0},
            "eval": {"every": 0, "test_prompts": 0},
            "run": {"output": str(output), "iterations": ITERATIONS, "seed": 3, "threads": 1},
        }
    )
    train(config, world=world)
    (output / f"rank{world.rank}.json").write_text(json.dumps(seen))
    world.barrier()


def case(folder: Path, noise: str, processes: int, shard: bool) -> dict[str, Any]:
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(processes), __file__, "--train", str(folder), noise]
    started = time.monotonic()
    subprocess.run([*command, str(int(shard))], check=True, stderr=subprocess.DEVNULL)
    seconds = time.monotonic() - started
    rollouts: dict[str, str] = {}
    for rank in range(processes):
        rollouts |= json.loads((folder / f"rank{rank}.json").read_text())
    place = folder / "flashgrpo" / "runs" / "run" / "checkpoints" / f"{ITERATIONS:06d}"
    return {
        "seconds": round(seconds, 1),
        "rollouts": len(rollouts),
        "rollouts_sha256": hashlib.sha256(
            json.dumps(rollouts, sort_keys=True).encode()
        ).hexdigest(),
        **{name: hashlib.sha256((place / name).read_bytes()).hexdigest() for name in FILES},
    }


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        train_one(Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "1")
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here too")
    out = parser.parse_args().out
    found: dict[str, Any] = {"iterations": ITERATIONS}
    same = True
    with tempfile.TemporaryDirectory() as folder:
        for noise in ("shared", "independent"):
            cases = {
                name: case(Path(folder) / noise / name.replace(" ", "_"), noise, *how)
                for name, how in CASES.items()
            }
            found[noise] = cases
            first = cases["1"]
            for key in first.keys() - {"seconds"}:
                same = same and all(one[key] == first[key] for one in cases.values())
    found["identical"] = same
    text = json.dumps(found, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
