"""Does every preset fit its card, by the memory plan and with its margin?

    python benchmarks/preset_memory.py [--out FILE.json] [--only TEXT]...

Takes some seconds a preset. The table of the last run is in `benchmarks/results/preset_memory.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashgrpo_core.config_io import build_config  # noqa: E402
from flashgrpo_core.memory_fit import fit, needed  # noqa: E402
from flashgrpo_core.model_shapes import published_shapes  # noqa: E402
from flashgrpo_core.presets import PRESETS, preset_tables  # noqa: E402


def row(name: str) -> dict[str, Any]:
    """What a preset needs on its card."""
    preset, tables = PRESETS[name], preset_tables(name)
    model = {**tables["model"], "transformer": "high.safetensors"}
    if "A14B" in name:
        model["transformer_low"] = "low.safetensors"
    config = build_config({**tables, "model": model})
    found = fit(config, published_shapes(preset.model), preset.card_gb, prompts=100)
    plan = found.plan
    return {
        "preset": name,
        "fits": found.fits and not found.changes,
        "needed_gb": round(needed(plan) / 1e9, 2),
        "peak_gb": round(plan.peak.device / 1e9, 2),
        "phase": plan.peak.name,
        "update_gb": next(round(p.device / 1e9, 2) for p in plan.phases if p.name == "update"),
        "main_memory_gb": round(plan.host / 1e9, 1),
        "forward_tflop": round(plan.forward_flops / 1e12, 1),
        "text_encoder_streams": found.streamed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    parser.add_argument("--only", action="append", help="presets whose name has this text")
    args = parser.parse_args()
    names = [n for n, p in PRESETS.items() if p.model and any(t in n for t in args.only or [""])]
    rows = []
    for name in names:
        rows.append(row(name))
        print("{preset:38} {needed_gb:7.2f} GB of its card, {phase:8} update {update_gb:6.2f} GB, main memory {main_memory_gb:6.1f} GB, {forward_tflop:7.1f} TFLOP, fits {fits}".format(**rows[-1]), flush=True)  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(r["fits"] for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
