"""The logs of a run: what is written is what is read, whatever byte the machine died at."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.runs.events import (
    EventLog,
    RewardLog,
    backwards,
    jsonable,
    latest,
    latest_each,
    read_events,
    read_rewards,
    repair,
    term_curves,
)


def test_record_carries_event_iteration_and_utc_time(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "events.jsonl").append(
        "iteration", 3, loss=-0.25, prompt="a – ä 🐈"
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["time"])
    assert list(record)[:3] == ["event", "iteration", "time"]
    assert read_events(tmp_path / "events.jsonl") == [record]
    raw = (tmp_path / "events.jsonl").read_bytes()
    assert raw.count(b"\n") == 1 and raw.endswith(b"\n")


def test_values_of_every_kind_become_plain_json(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "e.jsonl").append(
        "iteration",
        1,
        nan=math.nan,
        nested={"inf": [math.inf, 1.5]},
        numpy=np.float64(0.1),
        array=np.array([1.0, np.nan]),
        tensor=torch.tensor([1, 2]),
        path=Path("a") / "b.mp4",
        flag=True,
    )
    assert record["nan"] is None and record["nested"] == {"inf": [None, 1.5]}
    assert record["numpy"] == 0.1 and record["array"] == [1.0, None] and record["tensor"] == [1, 2]
    assert record["path"] == str(Path("a") / "b.mp4") and record["flag"] is True
    assert json.loads((tmp_path / "e.jsonl").read_text(encoding="utf-8")) == record


def test_a_value_without_json_form_is_named() -> None:
    with pytest.raises(FlashGRPOError, match="object"):
        jsonable({"x": object()})


def test_a_log_torn_at_any_byte_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    first = log.append("iteration", 1, prompt="größe")
    whole = path.read_bytes()
    second = log.append("iteration", 2, prompt="日本")
    full = path.read_bytes()
    for cut in range(len(whole), len(full) + 1):
        path.write_bytes(full[:cut])
        expected = [first, second] if cut >= len(full) - 1 else [first]
        assert read_events(path) == expected, cut
        again = EventLog(path).append("warning", 3)
        assert read_events(path) == [*expected, again], cut


def test_repair_changes_only_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    assert not repair(path)
    path.write_bytes(b"")
    assert not repair(path)
    path.write_bytes(b'{"a": 1}\n')
    assert not repair(path)
    path.write_bytes(b'{"a": 1}')
    assert repair(path) and path.read_bytes() == b'{"a": 1}\n'
    # Longer than one block of the backward search, without any line break.
    path.write_bytes(b'{"a": 1}\n' + b"x" * 200_000)
    assert repair(path) and path.read_bytes() == b'{"a": 1}\n'
    path.write_bytes(b"\0" * 10)
    assert repair(path) and path.read_bytes() == b""


def test_damage_in_the_middle_is_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"event": "a"}\n\xff\xfe{\n[1]\n{"event": "b"}\n')
    assert [r["event"] for r in read_events(path)] == ["a", "b"]
    assert "line 2" in caplog.text and "line 3" in caplog.text


def test_latest_takes_the_last_line_per_event_and_iteration() -> None:
    events = [
        {"event": "iteration", "iteration": 1, "loss": 1},
        {"event": "iteration", "iteration": 2, "loss": 2},
        {"event": "warning", "iteration": 2},
        {"event": "iteration", "iteration": 2, "loss": 3},
    ]
    found = latest(events)
    assert found["iteration", 2]["loss"] == 3 and found["iteration", 1]["loss"] == 1
    assert set(found) == {("iteration", 1), ("iteration", 2), ("warning", 2)}


def test_latest_each_keeps_several_evaluations_of_one_iteration() -> None:
    events = [
        {"event": "evaluation", "iteration": 5, "split": "test", "reward_mean": 1},
        {"event": "evaluation", "iteration": 5, "split": "validation", "reward_mean": 2},
        {"event": "evaluation", "iteration": 0, "split": "validation", "reward_mean": 0},
        {"event": "evaluation", "iteration": 5, "split": "test", "reward_mean": 3},
    ]
    rows = latest_each(events, "evaluation", "split")
    assert [(r["iteration"], r["split"], r["reward_mean"]) for r in rows] == [
        (0, "validation", 0),
        (5, "test", 3),
        (5, "validation", 2),
    ]


def test_rewards_of_a_repeated_iteration_replace_the_first(tmp_path: Path) -> None:
    log = RewardLog(tmp_path / "rewards.jsonl")
    rows = [
        {"group_id": "g-0", "sample": i, "total": float(i), "terms": {"motion": 1.0}}
        for i in (0, 1)
    ]
    log.append(1, rows)
    log.append(2, [])
    log.append(1, [{**rows[0], "total": 7.0}, rows[1]])
    found = read_rewards(tmp_path / "rewards.jsonl")
    assert [(r["iteration"], r["sample"], r["total"]) for r in found] == [(1, 0, 7.0), (1, 1, 1.0)]


@pytest.mark.parametrize("size", [1, 40, 70_000, 140_000])
def test_backwards_is_the_reverse_of_reading(tmp_path: Path, size: int) -> None:
    path = tmp_path / "e.jsonl"
    log = EventLog(path)
    for i in range(7):
        log.append("iteration", i, text="ü" * (size // (i + 1)))
    assert list(backwards(path)) == read_events(path)[::-1]
    assert list(backwards(tmp_path / "none.jsonl")) == []


def test_a_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(FlashGRPOError, match="events.jsonl"):
        EventLog(tmp_path / "events.jsonl").append("iteration", 1)


def test_term_curves_leave_out_win_rates_that_say_nothing() -> None:
    def record(iteration: int, **terms: float | None) -> dict:
        return {"event": "iteration", "iteration": iteration, "reward": {"terms": terms}}

    events = [
        record(1, **{"a": 0.2, "b.win_rate": 0.5, "b": 3.0, "c.win_rate": 0.5}),
        {"event": "phase", "iteration": 1},
        record(2, **{"a": 0.9, "b.win_rate": 0.5, "b": None}),
        record(2, **{"a": 0.4, "b.win_rate": 0.5, "b": 4.0}),
    ]
    assert term_curves(events) == {
        "a": [(1, 0.2), (2, 0.4)],
        "b": [(1, 3.0), (2, 4.0)],
        "c.win_rate": [(1, 0.5)],
    }
