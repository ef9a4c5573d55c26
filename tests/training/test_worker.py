"""Real worker processes: killed, stopped, cancelled, asked to end, and several as one."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from flashgrpo_core.runs.queue import Queue
from tests.soak.worker_soak import claims, killed, left_over, start, stopped
from tests.worker_process import WorkerProcess, events, submit, wait_until


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="POSIX signals")
def test_killed_stopped_cancelled_given_back(tmp_path: Path) -> None:
    """The short form of `tests/soak/worker_soak.py`; then a cancel ends a job at once, and a worker
    that is asked to end gives its job back, which the other one finishes."""
    draw, running = random.Random(1), start(tmp_path)
    try:
        figures = killed(tmp_path, running, jobs=3, kills=1, draw=draw)
        assert figures["takeovers"] == 1
        same = stopped(tmp_path, running, trials=1, draw=draw)
        assert same["lora_sha256"] == figures["lora_sha256"]

        endless = {"run": {"iterations": 1000}}
        jobs = [submit(tmp_path, "cancelled", endless), submit(tmp_path, "back", endless)]
        wait_until(lambda: all(job.progress().get("phase") for job in jobs), what="the training")
        pressed = time.monotonic()
        jobs[0].cancel()
        assert wait_until(jobs[0].result)["status"] == "stopped"
        assert time.monotonic() - pressed < 20
        owner = jobs[1].lease().owner
        leaving = running[int(owner[1])]
        assert leaving.stop() == 0, leaving.log()
        assert "given back" in leaving.log()
        wait_until(lambda: jobs[1].lease().generation == 3, what="the next worker")
        assert jobs[1].lease().owner != owner
        wait_until(lambda: jobs[1].progress().get("phase"), what="the training")
        jobs[1].finish()
        assert wait_until(jobs[1].result)["status"] == "finished"
        for run, status in (("cancelled", "stopped"), ("back", "finished")):
            ends = [e["status"] for e in events(tmp_path, run) if e["event"] == "run_finished"]
            assert ends == [status]
    finally:
        for worker in running:
            worker.stop()
    # Who ended in order leaves no heartbeat; that of the killed one may stay for ten leases.
    ended = {re.search(r"worker (w\d\.\w+):", worker.log())[1] for worker in running}
    left = set(Queue(tmp_path).workers())
    assert len(ended) == 2 and not left & ended and len(left) <= figures["kills"], (left, ended)
    assert not left_over(tmp_path / "flashgrpo" / "runs")


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
