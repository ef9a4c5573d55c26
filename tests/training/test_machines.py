"""Two machines train one run together; one is lost, and a restart resumes to the undisturbed bytes.

The machines are network namespaces joined by a virtual cable, which is cut: like a machine without
power, the lost one sends no goodbye. Where namespaces are forbidden, two agents on the loopback
address stand for them and the lost one is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flashgrpo_core.config_io import dump_toml
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.training import train

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 20  # run.timeout, seconds


@dataclass
class Network:
    """Two places to start programs in, or twice the loopback address."""

    prefixes: list[list[str]]
    interfaces: list[str]
    address: str
    cable: list[str]

    def cut(self) -> None:
        if self.cable:
            subprocess.run(self.cable, check=True)


@pytest.fixture
def network() -> Iterator[Network]:
    names = [f"fg{os.getpid()}a", f"fg{os.getpid()}b"]
    ends = ["fgveth0", "fgveth1"]
    steps = [["ip", "netns", "add", name] for name in names]
    steps += [
        ["ip", "-n", names[0], "link", "add", ends[0], "type", "veth", "peer", "name", ends[1],
         "netns", names[1]],
    ]  # fmt: skip
    for name, end, number in zip(names, ends, (1, 2), strict=True):
        steps += [
            ["ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end],
            ["ip", "-n", name, "link", "set", end, "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    allowed = shutil.which("ip") is not None and all(
        subprocess.run(step, capture_output=True).returncode == 0 for step in steps
    )
    try:
        if allowed:
            inside = [["ip", "netns", "exec", name] for name in names]
            down = ["ip", "-n", names[1], "link", "set", ends[1], "down"]
            yield Network(inside, ends, "10.77.0.1", down)
        else:
            yield Network([[], []], ["lo", "lo"], "127.0.0.1", [])
    finally:
        if shutil.which("ip"):
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start(network: Network, job: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machines = []
    for number in (0, 1):
        command = [*network.prefixes[number], sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--node_rank", str(number), "--nproc_per_node", "1"]
        command += ["--master_addr", network.address, "--master_port", str(port)]
        machines.append(
            subprocess.Popen(
                [*command, "-m", "flashgrpo_core", "train", str(job)],
                cwd=ROOT,
                env=os.environ | {"GLOO_SOCKET_IFNAME": network.interfaces[number]},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return machines


def kill_tree(machine: subprocess.Popen[str]) -> None:
    """End a machine's programs, all at once and without a word."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(machine.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
    machine.wait(timeout=30)


def test_a_lost_machine_ends_the_other_in_time_and_a_restart_resumes(
    small_config: Any, tmp_path: Path, network: Network
) -> None:
    tables: dict[str, Any] = {
        "model": {"device": "cpu"},
        "rollout": {"micro_batch": 1},
        "eval": {"every": 0, "test_prompts": 0},
        "run": {"iterations": 4, "timeout": TIMEOUT},
    }
    config = small_config("lost", **tables)
    job = tmp_path / "job.toml"
    job.write_text(dump_toml(config), encoding="utf-8")
    run = RunFolder(tmp_path, "lost")
    machines = start(network, job)
    try:
        deadline = time.monotonic() + 300
        while not any(
            e["event"] == "checkpoint" and e["iteration"] >= 1 for e in read_events(run.events)
        ):
            assert machines[0].poll() is None, machines[0].communicate()[0][-3000:]
            assert time.monotonic() < deadline, "no first iteration"
            time.sleep(0.02)
        network.cut()
        kill_tree(machines[1])
        began = time.monotonic()
        said, _ = machines[0].communicate(timeout=TIMEOUT + 60)
        took = time.monotonic() - began
    finally:
        for machine in machines:
            kill_tree(machine)
    assert machines[0].returncode != 0
    assert "process 0 of 2 lost the others" in said, said[-3000:]
    assert "start the same command again: it resumes" in said
    assert took < TIMEOUT + 30, took
    last = read_events(run.events)[-1]
    assert (last["event"], last["status"]) == ("run_finished", "failed")

    if network.cable:
        subprocess.run([*network.cable[:-1], "up"], check=True)
    machines = start(network, job)
    try:
        said = machines[0].communicate(timeout=240)[0]
        machines[1].communicate(timeout=60)
    finally:
        for machine in machines:
            kill_tree(machine)
    assert [machine.returncode for machine in machines] == [0, 0], said[-3000:]
    started = [e for e in read_events(run.events) if e["event"] == "run_started"]
    assert [e["world_size"] for e in started] == [2, 2] and started[1]["resumed_from"] >= 1
    whole = train(small_config("whole", **tables))
    place = Path("checkpoints") / "000004"
    for name in ("adapter.safetensors", "ema.safetensors", "optimizer.safetensors"):
        assert (run.path / place / name).read_bytes() == (whole.folder / place / name).read_bytes()
