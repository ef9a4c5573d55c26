"""The same run on one, two and three processes gives the same bits, LoRA included.

Locks in: noise depends on what it is for and not on the rank; micro-batches are cut before they
are dealt; gradients are summed in float64. Real processes over gloo, started by torchrun.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from flashgrpo_core.config_io import dump_toml
from flashgrpo_core.runs.events import read_events

ROOT = Path(__file__).resolve().parents[2]


def run_with(processes: int, config_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, "--nproc_per_node", str(processes), "-m", "flashgrpo_core"]
    done = subprocess.run(
        [*command, "train", str(config_path)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_one_two_and_three_processes_give_the_same_bits(small_config, tmp_path):
    digests, worlds = [], []
    for processes in (1, 2, 3):
        config = small_config(
            f"world{processes}",
            rollout={"prompts_per_iteration": 3, "group_size": 3, "micro_batch": 2},
            model={"device": "cpu"},
            run={"iterations": 2, "processes": processes},
        )
        path = tmp_path / f"{processes}.toml"
        path.write_text(dump_toml(config), encoding="utf-8")
        run_with(processes, path)
        folder = tmp_path / "flashgrpo" / "runs" / f"world{processes}"
        adapter = folder / "checkpoints" / "000002" / "adapter.safetensors"
        digests.append(hashlib.sha256(adapter.read_bytes()).hexdigest())
        events = read_events(folder / "events.jsonl")
        worlds.append(next(e for e in events if e["event"] == "run_started")["world_size"])
    assert worlds == [1, 2, 3]
    assert len(set(digests)) == 1


def test_independent_noise_too(small_config, tmp_path):
    digests = []
    for processes in (1, 2):
        config = small_config(
            f"world{processes}",
            rollout={"noise": "independent", "group_size": 3, "micro_batch": 2},
            model={"device": "cpu"},
            eval={"every": 0, "test_prompts": 0},
            run={"iterations": 2, "processes": processes},
        )
        path = tmp_path / f"{processes}.toml"
        path.write_text(dump_toml(config), encoding="utf-8")
        run_with(processes, path)
        folder = tmp_path / "flashgrpo" / "runs" / f"world{processes}" / "checkpoints" / "000002"
        digests.append(hashlib.sha256((folder / "adapter.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1]
