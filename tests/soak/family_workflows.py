"""Workflows 05 to 08 from Run to a video with the LoRA, on small models of each architecture.

    python tests/soak/family_workflows.py [--out tests/soak/results/family_workflows.json] [name ...]

A real ComfyUI server; random weights, 128 wide and as deep as the real models, under the names that
the workflows ask for; the VAE of the 5B model and CLIP vision at their real size. Trains two iterations, saves the
LoRA and renders with it in stock nodes. Takes about five minutes on two free cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT, ROOT / "tests" / "host"):
    sys.path.insert(0, str(place))

from archive import install_pack  # noqa: E402
from family_workflows import WORKFLOWS, place_models, train_and_render  # noqa: E402
from fetch import COMFY_VERSION, comfy_tree  # noqa: E402
from harness import BASE_NAME, PACK_FOLDER, ComfyServer  # noqa: E402

from flashgrpo_core.files import open_tensors  # noqa: E402


def main() -> int:
    """Run all pairs; returns 1 if any key of a LoRA found no module or the LoRA did nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "tests/soak/results/family_workflows.json"
    )
    parser.add_argument("names", nargs="*", default=list(WORKFLOWS))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    install_pack(folder / BASE_NAME / "custom_nodes" / PACK_FOLDER)
    server = ComfyServer(folder)
    shutil.copyfile(comfy_tree() / "input" / "example.png", server.input / "example.png")
    for name in arguments.names:
        place_models(server, name, folder / "work", whole=True)
    # Named pairs replace their rows and leave the others.
    old = json.loads(arguments.out.read_text("utf-8")) if arguments.out.exists() else {}
    rows = {} if len(arguments.names) == len(WORKFLOWS) else old.get("workflows", {})
    server.start(timeout=600)
    try:
        for name in arguments.names:
            started = time.monotonic()
            row = train_and_render(server, name, whole=True)
            for lora in row["loras"]:
                header = open_tensors(server.output / "loras" / lora).metadata
                row.setdefault("headers", []).append(
                    {
                        key: header[f"flashgrpo.{key}"]
                        for key in ("base_family", "expert")
                        if f"flashgrpo.{key}" in header
                    }
                )
            rows[name] = row | {"seconds": round(time.monotonic() - started)}
            print(name, json.dumps(rows[name]), flush=True)
            result = {"comfyui": COMFY_VERSION, "workflows": dict(sorted(rows.items()))}
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    good = all(not row["not_loaded"] and row["difference"] > 0.1 for row in rows.values())
    print("all LoRAs matched and changed the video" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
