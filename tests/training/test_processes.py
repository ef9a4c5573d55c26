"""The same run on one, two and three processes gives the same bits, LoRA included.

Locks in: noise depends on what it is for and not on the rank; micro-batches are cut before they
are dealt; gradients are summed in float64; sharded weights are gathered unchanged. Real processes
over gloo, started the ways a user starts them.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from flashgrpo_core.config_io import dump_toml
from flashgrpo_core.runs.events import read_events

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "docs" / "launch"


def torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def accelerate(config: str, processes: int) -> list[str]:
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / config)]
    # A free port: several of these may run on one machine.
    return [*launch, "--num_processes", str(processes), "--main_process_port", "0"]


def trained(launcher: list[str], config: Any, tmp_path: Path) -> tuple[str, dict[str, Any], str]:
    """Train; returns the adapter's digest, the `run_started` event and what was said."""
    job = tmp_path / f"{config.run.name}.toml"
    job.write_text(dump_toml(config), encoding="utf-8")
    command = [sys.executable, *launcher, "-m", "flashgrpo_core", "train", str(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "flashgrpo" / "runs" / config.run.name
    adapter = folder / "checkpoints" / "000002" / "adapter.safetensors"
    events = read_events(folder / "events.jsonl")
    started = next(e for e in events if e["event"] == "run_started")
    return hashlib.sha256(adapter.read_bytes()).hexdigest(), started, done.stderr


def test_one_two_and_three_processes_give_the_same_bits(small_config, tmp_path):
    """Groups that do not divide by the processes, with all three kinds of launch."""
    launchers = {1: [], 2: accelerate("eight_gpus.yaml", 2), 3: torchrun(3)}
    digests = set()
    for processes, launcher in launchers.items():
        config = small_config(
            f"world{processes}",
            rollout={"prompts_per_iteration": 3, "group_size": 3, "micro_batch": 2},
            model={"device": "cpu"},
            run={"iterations": 2, "processes": processes},
        )
        digest, started, said = trained(launcher, config, tmp_path)
        digests.add(digest)
        assert started["world_size"] == processes
        assert (f"({processes} processes, " if processes > 1 else "(1 process)") in said
    assert len(digests) == 1


def test_sharded_weights_and_independent_noise_too(small_config, tmp_path):
    """Everything that asks for forwards at once: guidance, KL, recomputation, unequal work."""
    digests = []
    for name, launcher in (("whole", []), ("sharded", accelerate("eight_gpus_sharded.yaml", 2))):
        config = small_config(
            name,
            rollout={
                "noise": "independent",
                "group_size": 3,
                "micro_batch": 2,
                "guidance": 2.0,
            },
            prompts={"negative": "blurry"},
            loss={"kl": 0.1},
            model={"device": "cpu", "gradient_checkpointing": True},
            eval={"prompts": 1, "test_prompts": 0},
            run={"iterations": 2},
        )
        digest, started, _ = trained(launcher, config, tmp_path)
        assert started["sharded"] is (name == "sharded")
        digests.append(digest)
    assert digests[0] == digests[1]
