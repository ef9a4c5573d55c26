"""The run folder: its layout is a public format, its status is read from the events."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgrpo_core.config_io import build_config
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.runs.events import EventLog
from flashgrpo_core.runs.folder import RunFolder, free_name, list_runs

TABLES = {"model": {"transformer": "tiny"}, "run": {"seed": 7}}


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "my-run")
    base = tmp_path / "flashgrpo" / "runs" / "my-run"
    assert run.path == base
    assert run.config_path == base / "config.toml"
    assert run.events == base / "events.jsonl"
    assert run.rewards == base / "rewards.jsonl"
    assert (run.checkpoints, run.samples, run.lora) == tuple(
        base / name for name in ("checkpoints", "samples", "lora")
    )
    assert run.report == base / "report.html"


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "a\\b", "con", "x" * 65, "ünï", "a\0b", ".hid", "a."]
)
def test_names_that_leave_the_folder_or_break_windows_are_refused(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(FlashGRPOError, match="run name"):
        RunFolder(tmp_path, name)


def test_create_writes_the_complete_configuration_and_never_overwrites(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "späce dir", "r")
    assert not run.exists() and run.status() == "new"
    config = build_config(TABLES)
    run.create(config)
    assert run.exists() and run.config() == config
    assert run.checkpoints.is_dir() and run.samples.is_dir() and run.lora.is_dir()
    with pytest.raises(FlashGRPOError, match="'r-2'"):
        run.create(config)
    config.run.iterations = 999
    run.write_config(config)
    assert run.config().run.iterations == 999


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "unfinished"),
        (["run_started", "iteration"], "unfinished"),
        (["run_started", "run_finished:finished"], "finished"),
        (["run_started", "run_finished:failed"], "failed"),
        (["run_started", "run_finished:cancelled"], "unfinished"),
        (["run_started", "run_finished:finished", "evaluation", "warning"], "finished"),
        (["run_started", "run_finished:failed", "run_started"], "unfinished"),
    ],
)
def test_status(tmp_path: Path, events: list[str], status: str) -> None:
    run = RunFolder(tmp_path, "r")
    run.create(build_config(TABLES))
    log = EventLog(run.events)
    for number, text in enumerate(events):
        kind, _, value = text.partition(":")
        log.append(kind, number, **({"status": value} if value else {}))
    assert run.status() == status


def test_list_runs_and_free_name(tmp_path: Path) -> None:
    assert list_runs(tmp_path) == [] and free_name(tmp_path, "r") == "r"
    for name in ("b", "a", "r", "r-2"):
        RunFolder(tmp_path, name).create(build_config(TABLES))
    (tmp_path / "flashgrpo" / "runs" / "not a run").mkdir()
    (tmp_path / "flashgrpo" / "runs" / "empty").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["a", "b", "r", "r-2"]
    assert free_name(tmp_path, "r") == "r-3"
    long = "x" * 64
    RunFolder(tmp_path, long).create(build_config(TABLES))
    assert free_name(tmp_path, long) == "x" * 62 + "-2"


def test_at_finds_a_run_by_its_path(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "r")
    run.create(build_config(TABLES))
    assert RunFolder.at(run.path).path == run.path
    for wrong in (tmp_path, tmp_path / "flashgrpo" / "runs" / "none"):
        with pytest.raises(FlashGRPOError, match="run"):
            RunFolder.at(wrong)


def test_samples_index_merges(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "r")
    entry = {"iteration": 10, "split": "validation", "prompt": 0, "seed": 1, "file": "000010/a.mp4"}
    run.add_samples([{**entry, "reward": 0.5}, {**entry, "iteration": 2, "reward": 0.1}])
    run.add_samples([{**entry, "reward": 0.75}])
    assert [(r["iteration"], r["reward"]) for r in run.read_samples()] == [(2, 0.1), (10, 0.75)]
    run.samples_index.write_text("{", encoding="utf-8")
    with pytest.raises(FlashGRPOError, match="index.json"):
        run.read_samples()


def test_only_one_trainer_at_a_time(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "r")
    with run.lock():
        with (
            pytest.raises(FlashGRPOError, match="another process"),
            RunFolder(tmp_path, "r").lock(),
        ):
            raise AssertionError("the run was locked twice")
    with run.lock():
        pass
