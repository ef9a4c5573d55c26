"""Scoring beside sampling: the same bytes, less time, and stops as cleanly.

Locks in: the thread changes no number; what it saves is visible in the run's own timeline; a
failing reward and a cancel come out of the thread as they would without it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import numpy as np
import pytest

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import REWARDS, VideoBatch
from flashgrpo_core.rewards.motion import MotionReward
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.training import train
from tests.training._small import Recorder

#: Three micro-batches per iteration, of which the score of each is worth a sleep.
TABLES: dict[str, dict[str, Any]] = {
    "rollout": {"prompts_per_iteration": 3, "group_size": 2, "micro_batch": 2, "decode_batch": 2},
    "eval": {"every": 0, "test_prompts": 0},
    "run": {"iterations": 2},
}


class SlowMotion(MotionReward):
    """Motion on a machine far away: it takes time, and none of this machine's."""

    name = "slow_motion"
    seconds = 0.2
    threads: set[str] = set()

    def score(self, batch: VideoBatch) -> dict[str, np.ndarray]:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        return {"slow_motion": super().score(batch)["slow_motion"]}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[SlowMotion]:
    monkeypatch.setitem(REWARDS, "slow_motion", SlowMotion)
    monkeypatch.setattr(SlowMotion, "threads", set())
    return SlowMotion


def checksums(folder) -> dict[str, str]:
    checkpoint = folder / "checkpoints" / "000002"
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in checkpoint.glob("*.safe*")}


def test_the_thread_changes_no_byte_and_saves_time(small_config, slow):
    terms = [{"name": "slow_motion"}, {"name": "diversity"}, {"name": "brightness"}]
    results = {}
    for name, overlap in (("plain", False), ("beside", True)):
        config = small_config(name, **TABLES, reward={"terms": terms, "overlap": overlap})
        results[name] = train(config)
    assert checksums(results["plain"].folder) == checksums(results["beside"].folder)
    assert slow.threads == {"MainThread", "reward"}
    events = read_events(results["beside"].folder / "events.jsonl")
    timelines = [e for e in events if e["event"] == "timeline"]
    assert [e["iteration"] for e in timelines] == [1, 2]
    for timeline in timelines:
        lanes = timeline["lanes"]
        assert [len(lanes[lane]) for lane in ("sample", "decode", "score")] == [3, 3, 3]
        busy = {lane: sum(end - start for start, end in spans) for lane, spans in lanes.items()}
        assert busy["score"] >= 6 * slow.seconds
        # Scored and sampled at the same time for most of what both together took.
        work = busy["sample"] + busy["decode"]
        assert timeline["seconds"] < busy["score"] + work - 0.5 * min(work, busy["score"])
    assert not [e for e in read_events(results["plain"].folder / "events.jsonl") if "lanes" in e]
    page = (results["beside"].folder / "report.html").read_text(encoding="utf-8")
    assert "beside sampling" in page


def test_a_failing_reward_stops_the_run_from_inside_the_thread(small_config, slow, monkeypatch):
    def broken(self: SlowMotion, batch: VideoBatch) -> dict[str, np.ndarray]:
        raise FlashGRPOError("the reward broke: mend it")

    monkeypatch.setattr(slow, "score", broken)
    reward = {"terms": [{"name": "slow_motion"}], "overlap": True}
    with pytest.raises(FlashGRPOError, match="the reward broke: mend it"):
        train(small_config(**TABLES, reward=reward))
    assert "reward" not in {thread.name for thread in threading.enumerate()}


def test_a_cancel_does_not_wait_for_the_scores(small_config, slow, monkeypatch):
    monkeypatch.setattr(slow, "seconds", 1.0)
    reward = {"terms": [{"name": "slow_motion"}], "overlap": True}
    started = time.monotonic()
    stopped = train(small_config(**TABLES, reward=reward), Recorder(("rollout", 1), 20))
    assert stopped.status == "stopped" and stopped.iteration == 0
    assert time.monotonic() - started < 6 * 1.0 + 3
    assert "reward" not in {thread.name for thread in threading.enumerate()}


def test_hosts_that_move_networks_score_in_turn(small_config):
    config = small_config(**TABLES, reward={"overlap": True}, model={"offload": True})
    config.run.iterations = 1
    result = train(config)
    events = read_events(result.folder / "events.jsonl")
    (warning,) = [e for e in events if e.get("code") == "no_overlap"]
    assert "set it to false" in warning["message"]
    assert not [e for e in events if e["event"] == "timeline"]
