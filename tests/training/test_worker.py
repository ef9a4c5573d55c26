"""Real worker processes: killed, stopped, cancelled, asked to end, and several as one."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from flashgrpo_core.runs.queue import Queue
from tests.soak.worker_soak import check_runs, claims, killed, left_over, tree
from tests.worker_process import WorkerProcess, events, submit, wait_until


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX signals")
def test_a_few_jobs_survive_killed_workers(tmp_path: Path) -> None:
    """The short form of `tests/soak/worker_soak.py`."""
    killed(tmp_path, jobs=4, workers=2, kills=1, draw=random.Random(1))
    assert not left_over(tmp_path / "flashgrpo" / "runs")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="POSIX signals")
def test_stopped_cancelled_given_back(tmp_path: Path) -> None:
    """A worker that wakes up after its lease writes nothing and takes the next job; a cancel ends
    a job at once; a worker that is asked to end gives its job back, which another one finishes."""
    first = WorkerProcess(tmp_path, "first")
    second = None
    try:
        longer = {"run": {"iterations": 3}}
        stopped = submit(tmp_path, "stopped", longer)
        wait_until(lambda: stopped.progress().get("phase"), what="the training")
        first.send(signal.SIGSTOP)
        second = WorkerProcess(tmp_path, "second")
        wait_until(stopped.result, what="the take-over")
        folder = tmp_path / "flashgrpo" / "runs" / "stopped"
        before = tree(folder)
        first.send(signal.SIGCONT)
        time.sleep(1.5)
        assert tree(folder) == before
        assert [e["generation"] for e in events(tmp_path, "stopped") if e["event"] == "job"] == [
            1,
            2,
        ]

        # The second worker ends when asked; its job goes back and the first one finishes it.
        back = submit(tmp_path, "back", longer)
        cancelled = submit(tmp_path, "cancelled", {"run": {"iterations": 1000}})
        wait_until(lambda: back.progress().get("phase") and cancelled.progress().get("phase"))
        owners = {entry.name: entry.lease().owner.split(".")[0] for entry in (back, cancelled)}
        assert set(owners.values()) == {"first", "second"}, first.log()
        cancelled.cancel()
        pressed = time.monotonic()
        assert wait_until(cancelled.result)["status"] == "stopped"
        assert time.monotonic() - pressed < 20
        leaving = first if owners[back.name] == "first" else second
        done = back.result() is not None
        assert leaving.stop() == 0, leaving.log()
        wait_until(back.result, what="the end of the job that was given back")
        if not done and "given back" in leaving.log():
            assert back.lease().generation == 3
        digest = check_runs(tmp_path, [stopped, back])
        assert digest
    finally:
        first.stop()
        if second is not None:
            second.stop()
    assert not list(Queue(tmp_path).workers())


def test_several_processes_are_one_worker(tmp_path: Path) -> None:
    """Under torchrun the main process takes the jobs; a bad job does not end the worker."""
    bad = submit(tmp_path, "bad", {"run": {"processes": 3}})
    good = submit(tmp_path, "good", {"run": {"processes": 2}})
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
    worker = WorkerProcess(tmp_path, "pair", launcher=launcher, options=["--once"])
    try:
        assert worker.process.wait(180) == 0, worker.log()
    finally:
        worker.stop()
    assert bad.result()["status"] == "failed" and "run.processes = 3" in bad.result()["reason"]
    assert good.result()["status"] == "finished", worker.log()
    (started,) = (e for e in events(tmp_path, "good") if e["event"] == "run_started")
    assert started["world_size"] == 2
    assert [e["world_size"] for e in claims(tmp_path, [good])] == [2]
    ends = [e["status"] for e in events(tmp_path, "bad") if e["event"] == "run_finished"]
    assert ends == ["failed"]
