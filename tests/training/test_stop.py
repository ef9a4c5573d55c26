"""Signals: a run that is asked to stop saves, exits 0, and resumes to the undisturbed bytes.

Real processes and real signals, one process and two; the resumed run may have another number of
processes than the stopped one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashgrpo_core.config import Config
from flashgrpo_core.config_io import build_config, dump_toml
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.training import train
from tests.training._small import SMALL

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
PARTS = ("adapter.safetensors", "ema.safetensors", "optimizer.safetensors")


def config_in(output: Path, iterations: int = 4) -> Config:
    tables = {table: dict(values) for table, values in SMALL.items()}
    tables["model"] |= {"device": "cpu"}
    tables["rollout"] |= {"micro_batch": 1}
    tables["eval"] = {"every": 0, "test_prompts": 0}
    tables["run"] |= {"iterations": iterations, "output": str(output)}
    return build_config(tables)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The last checkpoint of a run that nobody stopped."""
    return last_checkpoint(train(config_in(tmp_path_factory.mktemp("whole"))).folder)


def last_checkpoint(folder: Path, iteration: int = 4) -> list[bytes]:
    place = folder / "checkpoints" / f"{iteration:06d}"
    return [(place / name).read_bytes() for name in PARTS]


class Process:
    """`flashgrpo train` in a process of its own."""

    def __init__(self, output: Path, launcher: list[str] | None = None) -> None:
        config = config_in(output)
        self.run = RunFolder(output, config.run.name)
        job = output / "job.toml"
        job.write_text(dump_toml(config), encoding="utf-8")
        command = [sys.executable, *(launcher or []), "-m", "flashgrpo_core", "train", str(job)]
        self.popen = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 180
        while not reached():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                self.popen.kill()
                raise AssertionError(f"no {what}: {self.popen.communicate()[1][-3000:]}")
            time.sleep(0.02)

    def wait_for_iteration(self, iteration: int) -> None:
        self.wait_until(
            lambda: any(
                e["event"] == "iteration" and e["iteration"] >= iteration
                for e in read_events(self.run.events)
            ),
            f"iteration {iteration}",
        )

    def end(self) -> tuple[str, str]:
        return self.popen.communicate(timeout=180)


def stopped_iteration(out: str) -> int:
    found = re.search(r"stopped after iteration (\d+)", out)
    assert found, out
    return int(found[1])


def test_sigterm_saves_and_exits_0(tmp_path: Path, undisturbed: list[bytes]) -> None:
    first = Process(tmp_path)
    first.wait_for_iteration(1)
    first.popen.send_signal(signal.SIGTERM)
    out, err = first.end()
    assert first.popen.returncode == 0, err
    done = stopped_iteration(out)
    assert 1 <= done < 4
    assert f"resume with: flashgrpo train {first.run.path}" in out
    assert (first.run.checkpoints / f"{done:06d}").is_dir()
    last = read_events(first.run.events)[-1]
    assert (last["event"], last["status"], last["iteration"]) == ("run_finished", "stopped", done)

    result = train(config_in(tmp_path), resume="latest")
    assert result.status == "finished"
    assert last_checkpoint(result.folder) == undisturbed


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from flashgrpo_core.progress import Session, TerminalControl\n"
        "with Session(TerminalControl()):\n"
        "    print('ready', flush=True)\n"
        "    try:\n"
        "        for _ in range(600):\n"
        "            time.sleep(0.1)\n"
        "    finally:\n"
        "        time.sleep(60)  # a slow clean-up must not hold it up\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # the launcher's echo of the same request
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=10)[1].decode()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopping after the current step" in err and "ended at once" in err


def test_all_processes_stop_at_the_iteration_where_one_was_asked(
    tmp_path: Path, undisturbed: list[bytes]
) -> None:
    both = Process(tmp_path, TORCHRUN)
    both.wait_for_iteration(1)
    ranks = children(both.popen.pid)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGTERM)
    out, err = both.end()
    assert both.popen.returncode == 0, err[-3000:]
    done = stopped_iteration(out)
    assert 1 <= done < 4
    # One process goes on where two stopped.
    result = train(config_in(tmp_path))
    started = [e for e in read_events(both.run.events) if e["event"] == "run_started"]
    assert [e["world_size"] for e in started] == [2, 1]
    assert started[-1]["resumed_from"] == done
    assert last_checkpoint(result.folder) == undisturbed


def children(pid: int) -> list[int]:
    """The processes that `pid` has started, oldest first."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]
