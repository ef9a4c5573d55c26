"""Trainings in which something goes wrong: what the run does about it, and that nothing is lost."""

from __future__ import annotations

import pytest

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.training import train

NO_JUDGING = {"every": 0, "test_prompts": 0}


def codes(config) -> list[str]:
    events = read_events(RunFolder(config.run.output, config.run.name).events)
    return [e["code"] for e in events if e["event"] == "warning"]


def test_updates_end_when_the_clip_range_cuts_every_video(small_config):
    """One rollout, many updates: the later ones have no gradient left, which is no error."""
    config = small_config(
        optim={"updates_per_rollout": 6, "learning_rate": 3e-5},
        loss={"clip": 1e-8},
        eval=NO_JUDGING,
        run={"iterations": 3},
    )
    result = train(config)
    assert result.status == "finished" and result.iteration == 3
    events = read_events(result.folder / "events.jsonl")
    iterations = [e for e in events if e["event"] == "iteration"]
    assert all(e["clip_fraction"] == 1.0 and e["ratio_drift"] == 0.0 for e in iterations)
    assert all(e["grad_norm"] > 0 for e in iterations)
    updates = [e["iteration"] for e in events if e["event"] == "phase" and e["name"] == "update"]
    assert 2 <= updates.count(3) < 6
    assert codes(config) == ["clip_high"]
    # All iterations learnt: the first pass of each.
    assert iterations[0]["lr"] == iterations[2]["lr"] == pytest.approx(3e-5)


def test_an_epsilon_of_zero_is_refused(small_config):
    with pytest.raises(FlashGRPOError, match=r"optim.eps = 0.0 is outside 1e-20 to 0.01"):
        small_config(optim={"eps": 0.0})


def test_the_smallest_epsilon_trains(small_config):
    config = small_config(optim={"eps": 1e-20}, eval=NO_JUDGING, run={"iterations": 2})
    assert train(config).iteration == 2
    assert codes(config) == []
