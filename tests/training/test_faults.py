"""Faults of disk, reward, memory, clock and files: documented behaviour, and nothing lost.

Each case disturbs a run of the embedded tiny Wan, repairs the cause and goes on: the end must be
the one of a run that nothing happened to. What the user reads is in docs/reliability.md.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgrpo_core import trainer as trainer_module
from flashgrpo_core.build import load_networks, with_embedded_files
from flashgrpo_core.config import Config
from flashgrpo_core.config_io import build_config
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.files import open_tensors, save_tensors
from flashgrpo_core.keeping import RunResult
from flashgrpo_core.rewards.tiny_world import TinyWorldReward
from flashgrpo_core.runs import events as events_module
from flashgrpo_core.runs.checkpoint import list_checkpoints, newest_checkpoint, verify
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.trainer import MAX_EMPTY
from flashgrpo_core.training import train
from tests.training._small import SMALL

ITERATIONS = 3


class Bench:
    """Trains with networks that are loaded once and put back to their start for each run."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.networks = load_networks(self.config(folder))
        self.start = self.networks.policy.snapshot()
        self.whole = self.result(self.train(self.config(folder)))

    def config(self, output: Path, **run: Any) -> Config:
        tables = {table: dict(values) for table, values in SMALL.items()}
        tables["model"] |= {"device": "cpu", "lora_rank": 1}
        tables["eval"] = {"every": 0, "test_prompts": 0}
        tables["run"] |= {
            "iterations": ITERATIONS,
            "output": str(output),
            "keep": 9,
            "save_every": 1,
        } | run
        return build_config(tables)

    def train(self, config: Config) -> RunResult:
        self.networks.policy.load(self.start)
        return train(config, networks=self.networks, cache=self.cache)

    def result(self, result: RunResult) -> list[bytes]:
        assert result.status == "finished" and result.iteration == ITERATIONS
        last = result.folder / "checkpoints" / f"{ITERATIONS:06d}"
        files = [*sorted(last.iterdir()), *result.loras]
        assert len(files) == 5
        return [path.read_bytes() for path in files]

    def ends_as_undisturbed(self, config: Config) -> None:
        assert self.result(self.train(config)) == self.whole


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("undisturbed"))


def folder_of(config: Config) -> RunFolder:
    return RunFolder(config.run.output, config.run.name)


def ends(config: Config) -> list[dict[str, Any]]:
    return [e for e in read_events(folder_of(config).events) if e["event"] == "run_finished"]


def codes(config: Config) -> list[str]:
    events = read_events(folder_of(config).events)
    return [e["code"] for e in events if e["event"] == "warning"]


def at_call(number: int, fault: Callable[[Any], Any], real: Callable[..., Any]) -> Any:
    """`real`, but what its `number`-th call returns goes through `fault`."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        found = real(*args, **kwargs)
        return fault(found) if calls == number else found

    return wrapped


def raising(exc: Exception) -> Callable[[Any], Any]:
    def fault(found: Any) -> Any:
        raise exc

    return fault


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.name == "nt" or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_and_a_read_only_one(bench: Bench, small_disk: Path) -> None:
    config = bench.config(small_disk)
    folder = folder_of(config)
    # Room for the first checkpoint and not for the third.
    size = sum(
        p.stat().st_size
        for p in (
            list_checkpoints(folder_of(bench.config(bench.cache.parent)).checkpoints)[1]
        ).iterdir()
    )
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2**20 - int(2.5 * size) - 60_000))
    with pytest.raises(FlashGRPOError, match="(?i)free|full") as caught:
        bench.train(config)
    assert "resume" in str(caught.value) or "choose another folder" in str(caught.value)
    kept = list_checkpoints(folder.checkpoints)
    assert kept and max(kept) < ITERATIONS
    for path in kept.values():
        verify(path)
    assert not [p for p in folder.path.rglob(".*") if p.name != ".lock"]
    raw = folder.events.read_bytes()
    assert raw.endswith(b"\n") and len(read_events(folder.events)) == raw.count(b"\n")

    filler.unlink()
    remount = ["mount", "-o", "remount", str(small_disk)]
    subprocess.run([*remount, "-r"], check=True)
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    with pytest.raises(FlashGRPOError, match="(?i)read-only"):
        bench.train(config)
    assert {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()} == before

    subprocess.run([*remount, "-w"], check=True)
    bench.ends_as_undisturbed(config)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            lambda found: {k: v * float("nan") for k, v in found.items()},
            "reward 'tiny_world' gave nan",
        ),
        (
            raising(ZeroDivisionError("no motion")),
            "reward 'tiny_world' failed on video 0: ZeroDivisionError: no motion",
        ),
        (raising(torch.OutOfMemoryError("CUDA out of memory")), "out of memory: lower"),
    ],
    ids=["nan", "exception", "out of memory"],
)
def test_a_reward_that_fails_ends_the_run_and_loses_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, says: str
) -> None:
    config = bench.config(tmp_path)
    with monkeypatch.context() as patch:
        # Four videos an iteration: the second iteration's third.
        patch.setattr(TinyWorldReward, "score", at_call(7, fault, TinyWorldReward.score))
        with pytest.raises((FlashGRPOError, torch.OutOfMemoryError)):
            bench.train(config)
    assert list(list_checkpoints(folder_of(config).checkpoints)) == [1]
    (end,) = ends(config)
    assert end["status"] == "failed" and says in end["reason"]
    assert folder_of(config).status() == "failed"
    bench.ends_as_undisturbed(config)


@pytest.mark.parametrize("where", ["decode", "backward"])
def test_out_of_memory_ends_the_run_and_loses_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    from flashgrpo_core import scoring

    config = bench.config(tmp_path)
    fault = raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))
    with monkeypatch.context() as patch:
        if where == "decode":
            patch.setattr(scoring, "decode_latents", at_call(3, fault, scoring.decode_latents))
        else:
            patch.setattr(torch.Tensor, "backward", at_call(3, fault, torch.Tensor.backward))
        with pytest.raises(torch.OutOfMemoryError):
            bench.train(config)
    assert "rollout.micro_batch" in ends(config)[0]["reason"]
    if where == "backward":
        # What is left of an unfinished backward pass must not enter the next gradient.
        assert any(p.grad is not None for p in bench.networks.policy.parameters().values())
    bench.ends_as_undisturbed(config)


def test_the_clock_may_jump(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part runs ten years ahead; files and records from the future do no harm."""
    config = bench.config(tmp_path)
    import time

    future = time.time() + 3.2e8
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: future)
        patch.setattr(events_module, "utc_now", lambda: "2036-12-01T00:00:00.000Z")
        bench.train(bench.config(tmp_path, iterations=1))
    for path in folder_of(config).path.rglob("*"):
        os.utime(path, (future, future))
    (folder_of(config).path / ".tmp-1-0123abcd").touch()
    os.utime(folder_of(config).path / ".tmp-1-0123abcd", (future, future))
    bench.ends_as_undisturbed(config)
    assert not list(folder_of(config).path.glob(".tmp*"))
    events = read_events(folder_of(config).events)
    assert all(e["seconds"] >= 0 for e in events if "seconds" in e)


def test_damaged_checkpoints_are_passed_over_and_named(bench: Bench, tmp_path: Path) -> None:
    bench.train(bench.config(tmp_path, iterations=2))
    config = bench.config(tmp_path)
    folder = folder_of(config)
    half = folder.checkpoints / "000002" / "optimizer.safetensors"
    half.write_bytes(half.read_bytes()[:1000])
    bench.ends_as_undisturbed(config)
    started = [e for e in read_events(folder.events) if e["event"] == "run_started"]
    assert started[-1]["resumed_from"] == 1
    # And when none is left, the run begins again instead of going on from something else.
    for path in list_checkpoints(folder.checkpoints).values():
        (path / "checkpoint.json").write_text("{}", encoding="utf-8")
    assert newest_checkpoint(folder.checkpoints, lambda *_: None) is None
    longer = bench.config(tmp_path, iterations=ITERATIONS + 1)
    assert bench.train(longer).iteration == ITERATIONS + 1
    assert "no_checkpoint" in codes(config) and codes(config).count("checkpoint_corrupt") >= 2


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_stops_the_run_at_last(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer_module.policy_gradient
    bad = {"iterations": {2}, "calls": 0}

    def gradient(*args: Any, **kwargs: Any) -> Any:
        found, stats = real(*args, **kwargs)
        bad["calls"] += 1
        if bad["calls"] in bad["iterations"]:
            next(iter(found.values())).view(-1)[0] = float("nan")
        return found, stats

    monkeypatch.setattr(trainer_module, "policy_gradient", gradient)
    config = bench.config(tmp_path)
    result = bench.train(config)
    assert result.status == "finished" and codes(config) == ["not_finite"]
    states = [
        torch.cat([t.flatten() for t in open_state(result.folder, i).values()]) for i in (1, 2, 3)
    ]
    assert torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])

    bad |= {"iterations": set(range(100)), "calls": 0}
    worse = bench.config(tmp_path, name="worse", iterations=20)
    with pytest.raises(FlashGRPOError, match=f"{MAX_EMPTY} iterations in a row.*learning_rate"):
        bench.train(worse)
    assert codes(worse) == ["not_finite"] * MAX_EMPTY


def open_state(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    file = open_tensors(folder / "checkpoints" / f"{iteration:06d}" / "adapter.safetensors")
    return {name: file.get(name) for name in file.keys()}


def test_nan_in_the_model_names_the_file_and_the_tensor(bench: Bench, tmp_path: Path) -> None:
    config = with_embedded_files(bench.config(tmp_path))
    file = open_tensors(Path(config.model.transformer))
    tensors = {name: file.get(name) for name in file.keys()}
    tensors["blocks.1.ffn.0.weight"].view(-1)[5] = float("nan")
    path = tmp_path / "downloaded.safetensors"
    save_tensors(path, tensors, None)
    config.model.transformer = str(path)
    with pytest.raises(FlashGRPOError) as caught:
        train(config, cache=bench.cache)
    text = str(caught.value)
    assert "blocks.1.ffn.net.0.proj.weight" in text and str(path) in text and "damaged" in text
    assert not folder_of(config).path.exists()  # nothing was trained: the name stays free
