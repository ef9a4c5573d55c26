"""Checkpoints: the same bytes for the same state, and never a moment in which a crash loses one."""

from __future__ import annotations

import builtins
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.runs import checkpoint as module
from flashgrpo_core.runs.checkpoint import (
    clean_temporary,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune,
    read_manifest,
    save_checkpoint,
)


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "adapter": {"b": torch.full((3, 2), value), "a": torch.tensor([1.0 / 3.0, value])},
        "optimizer": {"exp_avg_sq": torch.full((4,), value, dtype=torch.float64)},
    }


def digests(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


def test_round_trip_is_exact(tmp_path: Path) -> None:
    state = {
        "iteration": 12,
        "best": 1.0 / 3.0,
        "rng": [2**62 + 1, 5],
        "note": "größer",
        "none": None,
    }
    path = save_checkpoint(tmp_path / "checkpoints", 12, tensors(0.1), state)
    assert path == tmp_path / "checkpoints" / "000012"
    loaded, back = load_checkpoint(path)
    assert back == state
    assert {stem: set(t) for stem, t in loaded.items()} == {
        "adapter": {"a", "b"},
        "optimizer": {"exp_avg_sq"},
    }
    for stem, named in tensors(0.1).items():
        for name, value in named.items():
            assert loaded[stem][name].dtype == value.dtype and torch.equal(
                loaded[stem][name], value
            )


def test_bytes_depend_on_the_content_only(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "one", 1, tensors(2.0), {"b": 1, "a": 2})
    turned = {stem: dict(reversed(named.items())) for stem, named in reversed(tensors(2.0).items())}
    two = save_checkpoint(tmp_path / "two", 1, turned, {"a": 2, "b": 1})
    assert digests(one) == digests(two)
    assert set(digests(one)) == {"adapter.safetensors", "optimizer.safetensors", "checkpoint.json"}
    assert str(os.getpid()) not in (one / "checkpoint.json").read_text(encoding="utf-8")


class Killed(BaseException):
    """The process died here: from now on nothing may reach the disk."""


@contextmanager
def dies_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Let `step` changes of the disk happen; the next one and all later ones raise `Killed`.

    Everything after the first `Killed` fails as well, so clean-up code cannot help: exactly what a
    `kill -9` leaves.
    """
    count = {"calls": 0}

    def guard(function: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, **kwargs):
                if count["calls"] >= step:
                    raise Killed
                count["calls"] += 1
            return function(*args, **kwargs)

        return wrapped

    def always(*args: Any, **kwargs: Any) -> bool:
        return True

    def writes(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> bool:
        return any(letter in mode for letter in "wax+")

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "remove", "rmdir", "write"):
            patch.setattr(os, name, guard(getattr(os, name), always))
        patch.setattr(builtins, "open", guard(builtins.open, writes))
        patch.setattr("io.open", guard(__import__("io").open, writes))
        yield count


@pytest.mark.parametrize("existing", ["older", "same"])
def test_a_kill_between_any_two_changes_leaves_the_old_or_the_new_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: str
) -> None:
    first, second = (5, 6) if existing == "older" else (6, 6)
    step, finished, outcomes = 0, False, set()
    while not finished:
        folder = tmp_path / str(step)
        save_checkpoint(folder, first, tensors(1.0), {"value": 1.0})
        with dies_at(step, monkeypatch):
            try:
                save_checkpoint(folder, second, tensors(2.0), {"value": 2.0})
                finished = True
            except Killed:
                pass
        newest = newest_checkpoint(folder, lambda path, reason: pytest.fail(f"{path}: {reason}"))
        assert newest is not None, step
        loaded, state = load_checkpoint(newest)
        outcomes.add(state["value"])
        assert torch.equal(loaded["adapter"]["b"], torch.full((3, 2), state["value"])), step
        clean_temporary(folder)
        assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == [], step
        after = newest_checkpoint(folder)
        assert after is not None and load_checkpoint(after)[1] == state, step
        save_checkpoint(folder, second, tensors(2.0), {"value": 2.0})
        assert load_checkpoint(folder / f"{second:06d}")[1] == {"value": 2.0}
        step += 1
    assert step > 10 and outcomes == {1.0, 2.0}


def test_a_kill_while_deleting_never_looks_like_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, finished = 0, False
    while not finished:
        folder = tmp_path / str(step)
        for iteration in (1, 2, 3, 4):
            save_checkpoint(folder, iteration, tensors(iteration), {})
        with dies_at(step, monkeypatch):
            try:
                prune(folder, keep=1)
                finished = True
            except Killed:
                pass
        for path in list_checkpoints(folder).values():
            load_checkpoint(path)
        clean_temporary(folder)
        assert not [p for p in folder.iterdir() if p.name.startswith(".")]
        assert {3, 4} <= set(list_checkpoints(folder))
        step += 1
    assert step > 6


@pytest.mark.parametrize("fails", ["replace", "rename", "fsync"])
def test_a_full_disk_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    save_checkpoint(tmp_path, 1, tensors(1.0), {})

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for iteration in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(os, fails, full)
            with pytest.raises(FlashGRPOError, match="(?i)space"):
                save_checkpoint(tmp_path, iteration, tensors(2.0), {})
        left = sorted(p.name for p in tmp_path.iterdir())
        newest = newest_checkpoint(tmp_path)
        assert newest is not None and load_checkpoint(newest)[0]["adapter"]["b"][0, 0] == 1.0, left
        clean_temporary(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["000001"]


def test_newest_falls_back_past_damage_and_says_why(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save_checkpoint(tmp_path, iteration, tensors(iteration), {"n": iteration})
    data = bytearray((tmp_path / "000004" / "adapter.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "000004" / "adapter.safetensors").write_bytes(data)
    (tmp_path / "000003" / "optimizer.safetensors").unlink()
    (tmp_path / "000002" / "checkpoint.json").write_text("{", encoding="utf-8")
    reasons: list[tuple[str, str]] = []
    newest = newest_checkpoint(tmp_path, lambda path, reason: reasons.append((path.name, reason)))
    assert newest == tmp_path / "000001"
    assert [name for name, _ in reasons] == ["000004", "000003", "000002"]
    assert "SHA-256" in reasons[0][1] and "optimizer.safetensors" in reasons[1][1]
    assert "checkpoint.json" in reasons[2][1]
    with pytest.raises(FlashGRPOError, match="damaged"):
        load_checkpoint(tmp_path / "000004")


def test_damage_in_any_region_of_any_file_is_noticed(tmp_path: Path) -> None:
    """Flipped, cut and missing bytes in length field, header, data and manifest."""
    save_checkpoint(tmp_path, 1, tensors(1.0), {"n": 1})
    newest = save_checkpoint(tmp_path, 2, tensors(2.0), {"n": 2, "list": [1.5, "x"]})
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        # Every byte of the manifest; of the rest the length field, the header's and data's ends.
        places = range(0, len(whole), 1 if path.suffix == ".json" else 7)
        for place in {*places, *range(9), len(whole) - 1}:
            damaged = bytearray(whole)
            damaged[place] ^= 0x11
            path.write_bytes(damaged)
            assert newest_checkpoint(tmp_path, lambda *_: None) == tmp_path / "000001", (
                path,
                place,
            )
        for size in (0, 1, 8, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            found = newest_checkpoint(tmp_path, lambda *_: None)
            # The last byte of a manifest is its line break.
            assert found == (newest if whole[size:] == b"\n" else tmp_path / "000001")
        path.unlink()
        assert newest_checkpoint(tmp_path, lambda *_: None) == tmp_path / "000001"
        path.write_bytes(whole)
        assert newest_checkpoint(tmp_path) == newest


def test_none_without_checkpoints(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    clean_temporary(tmp_path / "none")
    assert prune(tmp_path / "none", 3) == []


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c", 1, tensors(1.0), {})
    shutil.copy(path / "adapter.safetensors", tmp_path / "c" / "adapter.safetensors")
    manifest = read_manifest(path)
    manifest["files"]["../adapter.safetensors"] = manifest["files"]["adapter.safetensors"]
    (path / "checkpoint.json").write_text(module.signed(manifest), encoding="utf-8")
    with pytest.raises(FlashGRPOError, match="no checkpoint file name"):
        load_checkpoint(path)


def test_a_newer_format_is_not_guessed_at(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, tensors(1.0), {})
    text = (
        (path / "checkpoint.json").read_text(encoding="utf-8").replace('"format": 1', '"format": 2')
    )
    (path / "checkpoint.json").write_text(text, encoding="utf-8")
    with pytest.raises(FlashGRPOError, match="format 2"):
        load_checkpoint(path)


@pytest.mark.parametrize("state", [{"x": float("nan")}, {"x": torch.zeros(1)}])
def test_state_must_be_finite_json(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(FlashGRPOError, match="JSON"):
        save_checkpoint(tmp_path, 1, tensors(1.0), state)
    assert list(tmp_path.iterdir()) == []


def test_a_stem_is_a_plain_name(tmp_path: Path) -> None:
    with pytest.raises(FlashGRPOError, match="stem"):
        save_checkpoint(tmp_path, 1, {"../x": {}}, {})


@pytest.mark.parametrize(
    ("keep", "best", "every", "left"),
    [
        (1, None, 1, [6, 7]),
        (3, None, 1, [5, 6, 7]),
        (3, 2, 1, [2, 5, 6, 7]),
        (2, 7, 1, [5, 6, 7]),
        (2, None, 3, [6, 7]),
        (3, 1, 3, [1, 3, 6, 7]),
        (1, 7, 1, [6, 7]),
    ],
)
def test_prune(tmp_path: Path, keep: int, best: int | None, every: int, left: list[int]) -> None:
    for iteration in range(1, 8):
        save_checkpoint(tmp_path, iteration, {"adapter": {"a": torch.zeros(1)}}, {})
    removed = prune(tmp_path, keep, best, every)
    assert list(list_checkpoints(tmp_path)) == left
    assert sorted(removed + left) == list(range(1, 8))


def test_windows_sharing_violations_are_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    real, failures, pauses = os.rename, [1, 1], []

    def flaky(source: Path, target: Path) -> None:
        if failures:
            failures.pop()
            raise PermissionError(errno.EACCES, "in use")
        real(source, target)

    monkeypatch.setattr(os, "rename", flaky)
    monkeypatch.setattr(module, "WINDOWS", True)
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    module._rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").is_dir() and len(pauses) == 2
