"""What training costs besides the networks: time per iteration, and bytes between processes.

    python benchmarks/overhead.py [--out benchmarks/results/overhead.json]

Time: a Wan of width 512 with 8 blocks on 768 tokens, CPU, one thread, batch sizes of the defaults.
Everything outside the transformer's forward and backward, the VAE and the reward counts as
overhead, checkpoint and optimizer too; more than 5 % is a failure. Bytes: what one process puts
into all-reduces per iteration of the embedded tiny Wan, for several LoRA ranks, video sizes and
numbers of processes; it must follow the LoRA's size and nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT = 0.05
WIDTH, BLOCKS, PIXELS, FRAMES = 512, 8, 256, 9
ITERATIONS = 3


class Spent:
    """Seconds inside named calls; a call inside another one counts for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    @contextmanager
    def inside(self, name: str):
        if self._inside:
            yield
            return
        self._inside, started = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside = False
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        call = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.inside(name):
                return call(*args, **kwargs)

        setattr(owner, attribute, timed)


def measure_time(folder: Path) -> dict[str, Any]:
    import torch
    from make_wan_1_3b import WAN_1_3B, write_transformer

    from flashgrpo_core import embedded, scoring
    from flashgrpo_core.config_io import build_config
    from flashgrpo_core.control import Control
    from flashgrpo_core.networks import load_networks
    from flashgrpo_core.rewards.mix import RewardMix
    from flashgrpo_core.training import train

    torch.set_num_threads(1)
    shape = {"num_attention_heads": WIDTH // 128, "ffn_dim": 4 * WIDTH, "num_layers": BLOCKS}
    write_transformer(folder / "wan_512.safetensors", WAN_1_3B | shape)
    config = build_config(
        {
            "model": {
                "transformer": str(folder / "wan_512.safetensors"),
                "vae": str(embedded.TINY_VAE),
                "text_encoder": str(embedded.TINY_TEXT_ENCODER),
                "text_tokens": embedded.TINY_TEXT_TOKENS,
                "device": "cpu",
            },
            "prompts": {"file": str(embedded.TINY_PROMPTS["train"])},
            "schedule": {"steps": 8},
            "rollout": {
                "width": PIXELS,
                "height": PIXELS,
                "frames": FRAMES,
                "guidance": 1.0,
                "group_size": 4,
                "prompts_per_iteration": 2,
            },
            "reward": {"terms": [{"name": "technical"}, {"name": "motion"}]},
            "eval": {"every": 0, "test_prompts": 0},
            "run": {"output": str(folder), "iterations": ITERATIONS, "threads": 1, "save_every": 1},
        }
    )
    networks = load_networks(config)
    spent, per_iteration, save = Spent(), [], []
    spent.wrap(networks.policy.transformer, "forward", "forward")
    spent.wrap(torch.Tensor, "backward", "backward")
    spent.wrap(scoring, "decode_latents", "vae")
    spent.wrap(RewardMix, "measure", "reward")

    class Listen(Control):
        def event(self, record: dict[str, Any]) -> None:
            if record["event"] == "iteration":
                per_iteration.append((record["seconds"], dict(spent.seconds)))
            if record["event"] == "phase" and record["name"] == "save":
                save.append(record["seconds"])

    spent.seconds.clear()
    train(config, Listen(), networks=networks)
    whole = sum(seconds for seconds, _ in per_iteration) + sum(save)
    parts = per_iteration[-1][1]
    overhead = whole - sum(parts.values())
    tokens = ((FRAMES - 1) // 4 + 1) * (PIXELS // 16) ** 2
    return {
        "model": {"width": WIDTH, "blocks": BLOCKS, "tokens": tokens},
        "iterations": len(per_iteration),
        "seconds_per_iteration": round(whole / len(per_iteration), 3),
        "seconds": {k: round(v / len(per_iteration), 3) for k, v in sorted(parts.items())},
        "checkpoint_seconds": round(sum(save) / len(save), 3),
        "overhead_seconds": round(overhead / len(per_iteration), 3),
        "overhead_share": round(overhead / whole, 4),
        "limit": LIMIT,
    }


def measure_bytes(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for processes, rank, pixels in ((2, 4, 64), (2, 16, 64), (2, 16, 96), (3, 16, 64)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(processes), __file__, "--bytes"]
        out = folder / f"{processes}_{rank}_{pixels}.json"
        options = [str(folder / out.stem), str(rank), str(pixels), str(out)]
        subprocess.run([*command, *options], check=True)
        rows.append({"processes": processes, "pixels": pixels} | json.loads(out.read_text()))
    return rows


def count_bytes(output: str, rank: str, pixels: str, out: str) -> None:
    """One of the processes of `measure_bytes`."""
    import torch

    from flashgrpo_core.config_io import build_config
    from flashgrpo_core.control import Control
    from flashgrpo_core.distributed import World
    from flashgrpo_core.training import train

    world, sums, counts = World.launched(cpu=True), [], []
    reduce = torch.distributed.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sums.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counted

    class Listen(Control):
        def event(self, record: dict[str, Any]) -> None:
            if record["event"] == "checkpoint":
                counts.append((sum(sums), len(sums)))

    config = build_config(
        {
            "model": {"transformer": "tiny", "device": "cpu", "lora_rank": int(rank)},
            "rollout": {
                "width": int(pixels),
                "height": int(pixels),
                "group_size": 2,
                "prompts_per_iteration": 2,
            },
            "reward": {"terms": [{"name": "motion"}]},
            "eval": {"every": 0, "test_prompts": 0},
            "run": {"output": output, "iterations": 2, "threads": 1},
        }
    )
    train(config, Listen(), world=world)
    if world.is_main:
        log = next(Path(output).rglob("events.jsonl")).read_text().splitlines()
        started = next(r for r in map(json.loads, log) if r["event"] == "run_started")
        lora = 4 * started["lora"]["parameters"]
        sent = counts[1][0] - counts[0][0]
        found = {
            "lora_rank": int(rank),
            "lora_bytes": lora,
            "bytes_per_iteration": sent,
            "sums_per_iteration": counts[1][1] - counts[0][1],
            "besides_gradient": sent - 2 * lora,
        }
        Path(out).write_text(json.dumps(found))
    world.barrier()


def main() -> int:
    if sys.argv[1:2] == ["--bytes"]:
        count_bytes(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here too")
    parser.add_argument("--only", choices=("time", "bytes"), help="measure one of the two")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.out and args.out.exists():
        found = json.loads(args.out.read_text())
    found |= {"machine": platform.machine(), "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "bytes":
            found["time"] = measure_time(Path(folder))
        if args.only != "time":
            found["bytes"] = measure_bytes(Path(folder))
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    fixed = {row["besides_gradient"] // row["processes"] for row in found.get("bytes", [])}
    over = found.get("time", {}).get("overhead_share", 0.0) > LIMIT
    if over or (fixed and max(fixed) > 4096):
        print("overhead above the limit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
