"""One iteration on a checkpoint with the real Wan 2.1 T2V 1.3B shapes: does it fit, what does it take?

    python benchmarks/real_shapes.py [--keep DIR]

Writes a random bf16 checkpoint in ComfyUI's keys (2.8 GB, removed afterwards unless --keep), loads it,
trains one iteration at 64x64x9 with the embedded VAE and text encoder, and exports the LoRA. Prints
the phases' seconds, the peak memory of the process and what the LoRA file holds, as JSON. The
figures of the last run are in `benchmarks/README.md`.
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
sys.path.insert(0, str(ROOT))

LIMIT_GB = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", metavar="DIR", help="folder that keeps checkpoint and run")
    folder = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as temporary:
        return measure(Path(folder or temporary))


def measure(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "wan_1.3b_random.safetensors"
    if not checkpoint.exists():
        # A process of its own, so that making the file does not count into the peak.
        maker = str(ROOT / "benchmarks" / "make_wan_1_3b.py")
        subprocess.run([sys.executable, maker, "--out", str(checkpoint)], check=True)

    from flashgrpo_core import embedded
    from flashgrpo_core.config_io import build_config
    from flashgrpo_core.control import Control
    from flashgrpo_core.runs.folder import free_name
    from flashgrpo_core.training import train
    from flashgrpo_core.wan.lora import read_lora

    events: list[dict] = []

    class Listen(Control):
        def event(self, record: dict) -> None:
            events.append(record)

    config = build_config(
        {
            "model": {
                "transformer": str(checkpoint),
                "vae": str(embedded.TINY_VAE),
                "text_encoder": str(embedded.TINY_TEXT_ENCODER),
                "text_tokens": 32,
                # fp32 compute: CPUs without bf16 instructions take minutes per forward in bf16.
                "dtype": "fp32",
                "gradient_checkpointing": True,
            },
            "prompts": {"file": str(embedded.TINY_PROMPTS["train"])},
            "schedule": {"steps": 4, "shift": 3.0},
            "rollout": {
                "width": 64, "height": 64, "frames": 9, "fps": 8.0, "guidance": 1.0,
                "group_size": 2, "prompts_per_iteration": 2, "micro_batch": 2, "decode_batch": 4,
            },
            "reward": {"terms": [{"name": "technical"}]},
            "eval": {"every": 0, "test_prompts": 0},
            "run": {"name": free_name(folder, "real-shapes"), "output": str(folder), "iterations": 1},
        }
    )  # fmt: skip
    started = time.monotonic()
    result = train(config, Listen())
    iteration = next(e for e in events if e["event"] == "iteration")
    pairs = read_lora(result.loras[0])
    peak = iteration["peak_memory"] / 1e9
    report = {
        "seconds": {e["name"]: round(e["seconds"], 1) for e in events if e["event"] == "phase"},
        "seconds_total": round(time.monotonic() - started, 1),
        "peak_memory_gb": round(peak, 2),
        "checkpoint_gb": round(checkpoint.stat().st_size / 1e9, 2),
        "lora_modules": len(pairs),
        "lora_parameters": sum(p.A.numel() + p.B.numel() for p in pairs.values()),
        "ratio_drift": iteration["ratio_drift"],
        "grad_norm": iteration["grad_norm"],
    }
    print(json.dumps(report, indent=1))
    ok = peak <= LIMIT_GB and report["lora_parameters"] == 11_796_480 and report["grad_norm"] > 0
    print("PASS" if ok else f"FAIL: expected at most {LIMIT_GB} GB and 11,796,480 parameters")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
