"""The demo, whole: the held-out reward rises, in little memory, and the LoRA is the policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from flashgrpo_core.runs.events import read_events

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_aligns_the_tiny_wan(tmp_path):
    command = [sys.executable, "-m", "flashgrpo_core", "demo", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["status"] == "finished"
    test = answer["test"]
    # Half of the gap to a perfect score, and an interval that is clear of zero.
    assert test["difference"] > 0.5 * (1 - test["baseline_mean"])
    assert test["ci_low"] > 0.05
    assert (test["sampler"], test["weights"], test["prompts"]) == ("ode", "ema", 12)
    folder = Path(answer["run"])
    events = read_events(folder / "events.jsonl")
    assert max(e["peak_memory"] for e in events if e["event"] == "iteration") < 2e9
    assert all(e["ratio_drift"] == 0.0 for e in events if e["event"] == "iteration")
    index = json.loads((folder / "samples" / "index.json").read_text(encoding="utf-8"))
    kept = [e for e in index if e["split"] == "test"]
    assert len(kept) == 8
    assert all(
        (folder / "samples" / e[k]).is_file() for e in kept for k in ("file", "baseline_file")
    )
    assert Path(answer["loras"][0]).stat().st_size > 100_000
    assert "<video" in (folder / "report.html").read_text(encoding="utf-8")
