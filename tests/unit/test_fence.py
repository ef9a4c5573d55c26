"""A worker that has lost its lease writes nothing, at whatever point it slept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flashgrpo_core import fence
from flashgrpo_core.fence import LostLease, fenced
from flashgrpo_core.files import save_tensors, write_text_atomic
from flashgrpo_core.runs.checkpoint import prune, save_checkpoint
from flashgrpo_core.runs.events import EventLog, RewardLog, read_events, repair
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.runs.queue import Entry, Queue
from flashgrpo_core.video import write_mp4
from flashgrpo_core.worker_job import take_over

TENSORS = {"adapter": {"a": torch.zeros(2)}}
OTHER = {"adapter": {"a": torch.ones(2)}}
VIDEO = np.zeros((2, 16, 16, 3), np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with two checkpoints and a log whose last line is torn."""
    run = RunFolder(tmp_path, "run")
    for path in (run.checkpoints, run.samples, run.lora):
        path.mkdir(parents=True)
    EventLog(run.events).append("iteration", 1)
    for iteration in (1, 2, 3, 4):
        save_checkpoint(run.checkpoints, iteration, TENSORS, {})
    return run


def tear(folder: RunFolder) -> None:
    with folder.events.open("ab") as file:
        file.write(b'{"event": "ite')


WRITES: dict[str, Callable[[RunFolder], object]] = {
    "event": lambda run: EventLog(run.events).append("iteration", 2),
    "rewards": lambda run: RewardLog(run.rewards).append(2, [{"total": 1.0}]),
    "text": lambda run: write_text_atomic(run.config_path, "x"),
    "lora": lambda run: save_tensors(run.lora / "x.safetensors", {"a": torch.zeros(1)}),
    "samples": lambda run: run.add_samples([{"iteration": 1, "file": "x.mp4"}]),
    "video": lambda run: write_mp4(run.samples / "x.mp4", VIDEO, 8.0),
    "checkpoint": lambda run: save_checkpoint(run.checkpoints, 5, TENSORS, {}),
    "same checkpoint": lambda run: save_checkpoint(run.checkpoints, 4, OTHER, {}),
    "prune": lambda run: prune(run.checkpoints, 1),
    "lock": lambda run: run.lock().__enter__(),
}


def snapshot(folder: RunFolder) -> dict[str, bytes]:
    return {
        path.relative_to(folder.path).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.path.rglob("*"))
    }


@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written_without_the_lease(folder: RunFolder, name: str) -> None:
    before = snapshot(folder)
    with fenced([folder.path], lambda: False, "lease"), pytest.raises(LostLease):
        WRITES[name](folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", WRITES)
def test_everything_is_written_with_it(folder: RunFolder, name: str) -> None:
    before = snapshot(folder)
    with fenced([folder.path], lambda: True, "lease"):
        WRITES[name](folder)
    assert snapshot(folder) != before


def test_a_torn_line_is_not_repaired_without_the_lease(folder: RunFolder) -> None:
    tear(folder)
    before = snapshot(folder)
    with fenced([folder.path], lambda: False, "lease"), pytest.raises(LostLease):
        repair(folder.events)
    assert snapshot(folder) == before


def test_other_folders_are_open(folder: RunFolder, tmp_path: Path) -> None:
    with fenced([folder.path], lambda: False, "lease"):
        write_text_atomic(tmp_path / "run2" / "x.txt", "x")
        write_text_atomic(folder.path.with_name("run-2") / "x.txt", "x")
    write_text_atomic(folder.path / "after.txt", "x")
    assert fence.holder() == ""


@pytest.mark.parametrize("name", [*WRITES, "repair"])
@pytest.mark.parametrize("point", range(1, 7))
def test_taken_over_right_after_a_check(folder: RunFolder, name: str, point: int) -> None:
    """The worst moment to sleep: between looking the lease up and the write that follows."""
    entry = Queue(folder.output).submit("0", "run", {})
    seen: list[dict[str, bytes]] = []
    checks = 0
    if name == "repair":
        tear(folder)

    def holds() -> bool:
        nonlocal checks
        checks += 1
        if checks == point:
            # Here the process sleeps; meanwhile another worker takes the run over.
            with fenced([folder.path], lambda: True, "other"):
                take_over(folder, entry)
            seen.append(snapshot(folder))
            return True
        return checks < point

    with fenced([folder.path], holds, "lease"):
        try:
            repair(folder.events) if name == "repair" else WRITES[name](folder)
        except Exception as exc:
            failure: Exception | None = exc
        else:
            failure = None
    if not seen:
        return  # it makes fewer checks
    after = snapshot(folder)
    if name == "prune" or (name == "same checkpoint" and failure):
        # Deleting what is superfluous, and moving aside what is found there, are harmless.
        kept = {key: value for key, value in seen[0].items() if not key.startswith("checkpoints/")}
        assert {k: v for k, v in after.items() if not k.startswith("checkpoints/")} == kept
        assert "checkpoints/000004/checkpoint.json" in after
        return
    if name == "lock":
        return
    # What it had moved aside itself, it may delete.
    before = {k: v for k, v in seen[0].items() if v and "/.old-" not in k}
    assert {k: v for k, v in after.items() if v} == before


def test_taking_over_keeps_the_log_and_frees_the_lock(folder: RunFolder) -> None:
    entry = Queue(folder.output).submit("0", "run", {})
    lease = entry.lease()
    assert lease is not None
    tear(folder)
    with fenced([folder.path], lambda: True, lease.name), folder.lock():
        draft = folder.lora / ".tmp-1-ab"
        draft.write_bytes(b"x")
        take_over(folder, entry)
        with folder.lock():  # the same machine: the old process still holds its own
            pass
    assert not draft.exists()
    assert [e["iteration"] for e in read_events(folder.events)] == [1]


def test_a_lock_of_somebody_else_stays(folder: RunFolder) -> None:
    entry = Entry(folder.output / "flashgrpo" / "queue" / "00000001")
    with folder.lock():
        take_over(folder, entry)
        assert folder.lock_path.exists()
