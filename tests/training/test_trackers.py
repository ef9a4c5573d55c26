"""Curves for other programs: what TensorBoard reads back is what the run has recorded."""

from __future__ import annotations

import builtins

import pytest

from flashgrpo_core import keeping
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.runs.events import latest_each, read_events
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.training import train

JUDGED_ONCE = {"every": 3, "prompts": 1, "seeds": 1, "test_prompts": 0}


def test_tensorboard_shows_the_numbers_of_the_events_also_after_a_resume(small_config, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = small_config(eval=JUDGED_ONCE, run={"iterations": 3, "trackers": ["tensorboard"]})
    # Died between the record of iteration 2 and its checkpoint: the resumed run repeats it.
    real = keeping.save_checkpoint

    def full_disk(folder, iteration, *rest):
        if iteration == 2:
            raise FlashGRPOError("no space left")
        return real(folder, iteration, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(keeping, "save_checkpoint", full_disk)
        with pytest.raises(FlashGRPOError, match="no space left"):
            train(config)
    assert train(config).status == "finished"
    folder = RunFolder(config.run.output, config.run.name)
    events = read_events(folder.events)
    read = accumulator.EventAccumulator(str(folder.path / "tensorboard" / folder.name))
    read.Reload()
    iterations = latest_each(events, "iteration")

    def curve(name: str) -> list[tuple[int, float]]:
        return [(e.step, e.value) for e in read.Scalars(name)]

    for key in ("loss", "grad_norm", "lr"):
        expected = [(e["iteration"], pytest.approx(e[key], rel=1e-6)) for e in iterations]
        assert curve(key) == expected and len(expected) == 3
    expected = [(e["iteration"], pytest.approx(e["reward"]["mean"])) for e in iterations]
    assert curve("reward/mean") == expected
    evaluations = latest_each(events, "evaluation", "split")
    expected = [(e["iteration"], pytest.approx(e["reward_mean"])) for e in evaluations]
    assert curve("validation/reward_mean") == expected and len(expected) == 2


def test_wandb_writes_into_the_run_folder_and_sends_nothing(small_config, monkeypatch):
    pytest.importorskip("wandb")
    import socket

    def connect(*args: object) -> None:
        raise AssertionError(f"connection to {args[1]}")

    real = socket.socket.connect
    monkeypatch.setattr(
        socket.socket,
        "connect",
        lambda s, to: (
            real(s, to) if s.family == socket.AF_UNIX or to[0] == "127.0.0.1" else connect(s, to)
        ),
    )
    config = small_config(
        eval={"every": 0, "test_prompts": 0}, run={"iterations": 1, "trackers": ["wandb"]}
    )
    folder = train(config).folder
    (data,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    text = data.read_bytes()
    assert b"grad_norm" in text and b"learning_rate" in text


def test_a_tracker_that_is_unknown_or_missing_is_named(small_config, monkeypatch):
    with pytest.raises(FlashGRPOError, match="'mlflow': choose from tensorboard, wandb"):
        small_config(run={"trackers": ["mlflow"]})
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    config = small_config(run={"trackers": ["tensorboard"]})
    with pytest.raises(FlashGRPOError, match=r"pip install 'flashgrpo\[trackers\]'"):
        train(config)
    assert not RunFolder(config.run.output, config.run.name).path.exists()
