"""How far `flashgrpo plan` is from what a run really takes, on the CPU.

    python benchmarks/plan_accuracy.py [--case NAME]... [--out FILE.json]

Each case makes a random checkpoint in ComfyUI's keys, trains two iterations in a child process, and
compares the peak of each phase of the second one with the prediction: resident memory (the kernel's
high-water mark, reset at the start of each phase) beyond that after all imports. Small blocks go
through mmap in the child, so that freed memory leaves the process at once and the figure is what is
in use. Linux only. The table of the last run is in `benchmarks/results/plan_accuracy.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

LIMIT = 0.10
WAN = {"attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256, "in_channels": 16, "out_channels": 16}  # fmt: skip
SMALL = {**WAN, "num_attention_heads": 4, "ffn_dim": 2048, "num_layers": 8}
WAN_1_3B = {**WAN, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
SIZE = {"fps": 8.0, "group_size": 4, "prompts_per_iteration": 2, "micro_batch": 2}

#: Name -> transformer, base width of the VAE (0: the embedded tiny one), tables of the run.
CASES: dict[str, tuple[dict[str, int], int, dict[str, dict[str, Any]]]] = {
    "small": (
        SMALL,
        0,
        {"rollout": {**SIZE, "width": 128, "height": 128, "frames": 17, "guidance": 1.0}},
    ),
    "small, no checkpointing": (
        SMALL,
        0,
        {
            "model": {"gradient_checkpointing": False},
            "rollout": {**SIZE, "width": 128, "height": 128, "frames": 17, "guidance": 1.0},
        },
    ),
    "small, guided, independent noise": (
        SMALL,
        0,
        {
            "model": {"gradient_checkpointing": False},
            "rollout": {
                **SIZE, "width": 128, "height": 128, "frames": 9, "noise": "independent",
                "keep_graph": 0.0, "guidance": 4.0, "guidance_batched": "sequential",
            },
        },
    ),
    "real VAE": (
        {**SMALL, "num_layers": 2},
        96,
        {"rollout": {**SIZE, "width": 96, "height": 96, "frames": 9, "guidance": 1.0}},
    ),
    "1.3B shape": (
        WAN_1_3B,
        0,
        {"rollout": {**SIZE, "width": 64, "height": 64, "frames": 9, "guidance": 1.0,
                     "group_size": 2, "decode_batch": 4}},
    ),
    "1.3B shape, larger video": (
        WAN_1_3B,
        0,
        {"rollout": {**SIZE, "width": 128, "height": 128, "frames": 9, "guidance": 1.0,
                     "group_size": 2, "decode_batch": 1}},
    ),
}  # fmt: skip


def tables_of(name: str, folder: Path) -> dict[str, Any]:
    """The run of a case, its files made if they are not there."""
    from make_wan_1_3b import write_transformer, write_vae

    from flashgrpo_core import embedded
    from flashgrpo_core.runs.folder import free_name

    transformer, vae, own = CASES[name]
    key = "-".join(str(transformer[k]) for k in ("num_attention_heads", "ffn_dim", "num_layers"))
    file = folder / f"wan-{key}.safetensors"
    if not file.exists():
        write_transformer(file, transformer)
    vae_file = folder / f"vae-{vae}.safetensors" if vae else embedded.TINY_VAE
    if vae and not vae_file.exists():
        write_vae(vae_file, vae)
    model = {
        "transformer": str(file),
        "vae": str(vae_file),
        "text_encoder": str(embedded.TINY_TEXT_ENCODER),
        "text_tokens": 32,
        "dtype": "fp32",
    }
    return {
        "model": {**model, **own.get("model", {})},
        "prompts": {"file": str(embedded.TINY_PROMPTS["train"])},
        "schedule": {"steps": 4, "shift": 3.0},
        "rollout": own["rollout"],
        "reward": {"terms": [{"name": "technical"}]},
        "eval": {"every": 0, "test_prompts": 0},
        "run": {
            "name": free_name(folder, "accuracy"),
            "output": str(folder),
            "iterations": 2,
            "threads": 1,
        },
    }


def status(field: str) -> int:
    """A field of the process's memory status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def child(name: str, folder: Path) -> int:
    """Train the case; prints the peak and seconds of each phase as JSON."""
    import diffusers  # noqa: F401
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel  # noqa: F401
    from transformers import UMT5EncoderModel  # noqa: F401

    from flashgrpo_core.config_io import build_config
    from flashgrpo_core.control import Control
    from flashgrpo_core.training import train

    config = build_config(tables_of(name, folder))
    torch.set_num_threads(1)
    warm = torch.nn.Conv3d(8, 8, 3, padding=1)  # what the first kernels of each kind bring along
    warm(torch.zeros(1, 8, 4, 16, 16)).sum().backward()
    torch.nn.functional.scaled_dot_product_attention(*[torch.zeros(1, 2, 64, 128)] * 3)
    (torch.zeros(64, 512, requires_grad=True) @ torch.zeros(512, 64)).sum().backward()
    del warm
    base = status("VmRSS")

    class Watch(Control):
        peaks: dict[str, int] = {}
        seconds: dict[str, float] = {}
        now = "load"

        def turn(self, name: str) -> None:
            self.peaks[self.now] = status("VmHWM") - base
            Path("/proc/self/clear_refs").write_text("5")
            self.now = name

        def phase(self, name: str, total: int, iteration: int = 0) -> None:
            self.turn(name)

        def event(self, record: dict[str, Any]) -> None:
            if record["event"] == "phase":
                self.seconds[record["name"]] = record["seconds"]

    watch = Watch()
    Path("/proc/self/clear_refs").write_text("5")
    train(config, watch)
    watch.turn("end")
    print(json.dumps({"peaks": watch.peaks, "seconds": watch.seconds}))
    return 0


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Peaks and seconds of a case, in a process of its own."""
    env = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    tables_of(name, folder)
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
    kept = folder / f"measured-{name}.json"  # with --folder, planning again need not measure again
    if not kept.exists():
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        kept.write_text(done.stdout.splitlines()[-1])
    return dict(json.loads(kept.read_text()))


def compare(name: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of predicted and measured bytes per phase."""
    from flashgrpo_core.build import build_prompts, needed_prompts
    from flashgrpo_core.config_io import build_config
    from flashgrpo_core.memory import plan_memory

    found = measure(name, folder)
    started = time.monotonic()
    config = build_config(tables_of(name, folder))
    prompts = len(needed_prompts(config, build_prompts(config)))
    plan = plan_memory(config, device="cpu", prompts=prompts)
    seconds = time.monotonic() - started
    print(f"{name}: planned in {seconds:.1f} s", file=sys.stderr)
    rows = []
    for phase in plan.phases:
        if phase.name in found["peaks"]:
            measured = found["peaks"][phase.name]
            rows.append(
                {
                    "case": name,
                    "phase": phase.name,
                    "predicted_mb": round(phase.device / 1e6, 1),
                    "measured_mb": round(measured / 1e6, 1),
                    "ratio": round(phase.device / measured, 3),
                    "seconds": round(found["seconds"].get(phase.name, 0.0), 1),
                }
            )
    ran = [row for row in rows if row["case"] == name]
    highest = max(row["predicted_mb"] for row in ran)
    peak = max(row["measured_mb"] for row in ran)
    rows.append(
        {
            "case": name,
            "phase": "peak",
            "predicted_mb": highest,
            "measured_mb": peak,
            "ratio": round(highest / peak, 3),
            "seconds": 0.0,
        }
    )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=[*CASES], help="default: all")
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    parser.add_argument("--folder", type=Path, help="keep checkpoints and runs here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child, args.folder)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.case or CASES:
            folder = args.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            own = compare(name, folder)
            rows += own
            for row in own:
                print("{case:34} {phase:12} {predicted_mb:10.1f} {measured_mb:10.1f} {ratio:7.3f} {seconds:7.1f}".format(**row))  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    worst = max(abs(r["ratio"] - 1.0) for r in rows if r["phase"] == "peak")
    print(f"largest error of a peak: {100 * worst:.1f} %, limit {100 * LIMIT:.0f} %")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
