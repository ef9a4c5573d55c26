"""The queue of jobs: order, claims, heartbeats, and what a job may say."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgrpo_core import embedded
from flashgrpo_core.config_io import build_config, to_tables
from flashgrpo_core.errors import Cancelled, FlashGRPOError
from flashgrpo_core.fence import LostLease, Released
from flashgrpo_core.progress import TerminalControl
from flashgrpo_core.ready_embeddings import ReadyEmbeddings, write_embeddings
from flashgrpo_core.runs.events import EventLog, read_from
from flashgrpo_core.runs.folder import RunFolder
from flashgrpo_core.runs.job import MAX_BYTES, Job, job_config, portable, read_job
from flashgrpo_core.runs.queue import Queue, Watch, write_heartbeat
from flashgrpo_core.worker import Worker
from flashgrpo_core.worker_job import Heart, JobControl, deaths

TINY = {"model": {"transformer": "tiny"}}


def at_once(count: int, action: Callable[[int], Any]) -> list[Any]:
    """Do something in many threads at the same moment."""
    barrier, found = threading.Barrier(count), [None] * count

    def run(index: int) -> None:
        barrier.wait()
        found[index] = action(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# --- queue ---------------------------------------------------------------------------------------


def test_every_job_gets_a_place_of_its_own(tmp_path: Path) -> None:
    entries = at_once(12, lambda i: Queue(tmp_path).submit("1", f"run{i}", TINY))
    assert sorted(entry.name for entry in entries) == [f"{i:08d}" for i in range(1, 13)]
    assert sorted(p.name for p in Queue(tmp_path).path.iterdir()) == sorted(
        entry.name for entry in entries
    )


def test_one_of_many_gets_a_job(tmp_path: Path) -> None:
    entry = Queue(tmp_path).submit("1", "run", TINY)
    for generation in range(1, 20):
        lease = entry.lease()
        assert lease is not None and lease.generation == generation - 1
        won = [new for new in at_once(8, lambda i, lease=lease: lease.pass_to(f"w{i}.0")) if new]
        assert len(won) == 1
        assert won[0].held() and won[0].beat({"beat": 1})
        assert not lease.held() and not lease.beat({"beat": 2})
        assert entry.progress() == {"beat": 1}


def test_a_cancelled_job_that_waits_ends_at_once(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    waiting, taken = queue.submit("1", "a", TINY), queue.submit("1", "b", TINY)
    taken.lease().pass_to("w.0")
    for entry in (waiting, taken):
        entry.cancel()
        assert entry.cancelled()
    assert waiting.result()["status"] == "stopped" and taken.result() is None
    assert queue.active("a") is None and queue.active("b").name == taken.name


def test_old_results_are_deleted_and_numbers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgrpo_core.runs.queue.KEPT", 4)
    queue = Queue(tmp_path)
    open_job = queue.submit("1", "open", TINY)
    for number in range(7):
        queue.submit("1", f"run{number}", TINY).end("finished")
    last = queue.submit("1", "last", TINY)
    assert last.name == "00000009"
    names = [entry.name for entry in queue.entries()]
    assert names == [open_job.name, *(f"{n:08d}" for n in (5, 6, 7, 8)), last.name]


def test_alive_is_what_changes_by_ones_own_clock() -> None:
    """Times inside files may be years off; only changes count."""
    now = [0.0]
    watch = Watch(lambda: now[0])
    assert watch.look("a", b'{"time": "1970"}') == (0.0, False)
    now[0] = 50.0
    assert watch.look("a", b'{"time": "1970"}') == (50.0, False)
    assert watch.look("a", b'{"time": "1969"}') == (0.0, True)
    now[0] = 53.0
    assert watch.look("a", b'{"time": "1969"}') == (3.0, True)
    watch.forget(set())
    assert watch.look("a", b'{"time": "1969"}') == (0.0, False)


def test_heartbeats_make_their_file_and_shrink(tmp_path: Path) -> None:
    path = tmp_path / "workers" / "w.json"
    for record in ({"phase": "a long word"}, {"phase": "x"}):
        assert write_heartbeat(path, record)
        assert json.loads(path.read_text()) == record


def make_worker(tmp_path: Path, **options: Any) -> Worker:
    from flashgrpo_core.distributed import World

    control = TerminalControl(quiet=True)
    return Worker(tmp_path, [], World(), control, **{"lease": 10.0, "name": "w", **options})


def test_claims_are_in_order_and_runs_do_not_overlap(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    for run in ("a", "b", "a", "c"):
        queue.submit("1", run, TINY)
    workers = [make_worker(tmp_path, name=f"w{i}") for i in range(4)]
    taken = [worker._take() for worker in workers]
    assert [t.entry.name[-1] if t else None for t in taken] == ["1", "2", "4", None]
    taken[0].entry.end("finished")
    assert workers[0]._take().entry.name[-1] == "3"


def test_the_heartbeat_of_a_dead_worker_goes_after_ten_leases(tmp_path: Path) -> None:
    worker, now = make_worker(tmp_path), [0.0]
    worker._watch = Watch(lambda: now[0])
    dead, living = (worker.queue.workers_path / f"{name}.json" for name in ("dead.0", "living.0"))
    write_heartbeat(dead, {"beat": 7})
    for beat, seconds in enumerate((0.0, 60.0, 99.0, 101.0)):
        now[0] = seconds
        write_heartbeat(living, {"beat": beat})
        assert worker._take() is None
        stays = {"dead.0"} if seconds < 100 else set()
        assert set(worker.queue.workers()) == {"living.0"} | stays


def test_a_silent_job_is_taken_over_and_a_beating_one_is_not(tmp_path: Path) -> None:
    entry = Queue(tmp_path).submit("1", "a", TINY)
    old = entry.lease().pass_to("old.0")
    old.beat({"beat": 1})
    now = [0.0]
    worker = make_worker(tmp_path)
    worker._watch = Watch(lambda: now[0])
    for beat in range(2, 6):
        assert worker._take() is None
        now[0] += 9.0
        old.beat({"beat": beat})
    assert worker._take() is None
    now[0] += 10.0
    taken = worker._take()
    assert taken is not None and taken.lease.generation == 2
    assert not old.held()
    assert taken.entry.progress()["worker"] == worker.id


def test_wishes_reach_the_worker_at_its_next_check(tmp_path: Path) -> None:
    entry = Queue(tmp_path).submit("1", "a", TINY)
    lease = entry.lease().pass_to("w.0")
    heart, session = Heart(tmp_path / "w.json", "w.0", 1), TerminalControl(quiet=True)
    heart.hold(entry, lease)
    control = JobControl(entry, build_config(TINY), heart, session)
    control.check()
    assert not control.finish()
    entry.finish()
    assert control.finish()
    entry.cancel()
    with pytest.raises(Cancelled):
        control.check()
    session.stop_requested = True
    with pytest.raises(Released):
        control.check()
    session.stop_requested = False
    lease.pass_to("other.0")
    heart.beat()
    assert heart.lost
    with pytest.raises(LostLease):
        control.check()


def test_a_log_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_from(path, 0) == ([], 0)
    log = EventLog(path)
    log.append("iteration", 1)
    first, offset = read_from(path, 0)
    with path.open("ab") as file:
        file.write(b'{"event": "itera')
    torn, same = read_from(path, offset)
    assert [e["iteration"] for e in first] == [1] and torn == [] and same == offset
    EventLog(path).append("iteration", 2)  # repairs the torn line
    more, _ = read_from(path, same)
    assert [e["iteration"] for e in more] == [2]


def test_only_deaths_in_a_row_at_one_place_count(tmp_path: Path) -> None:
    """Given back (the generation rises by two), progress, and other jobs end the row."""
    folder, job = RunFolder(tmp_path, "run"), Job("a" * 32, "1", "run", TINY)
    folder.path.mkdir(parents=True)
    log = EventLog(folder.events)
    counts = []
    for name, iteration, generation in (
        ("b", 0, 1),
        ("a", 0, 1),
        ("a", 0, 2),
        ("a", 0, 3),
        ("a", 0, 5),
        ("a", 1, 6),
        ("a", 1, 7),
    ):
        counts.append(deaths(folder, job, iteration, generation))
        log.append("job", iteration, id=name * 32, generation=generation)
    assert counts == [0, 0, 1, 2, 0, 0, 1]


# --- jobs ----------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    """An output folder and a models folder with a file of each kind."""
    output, models = tmp_path / "output", tmp_path / "models"
    for name in (
        "diffusion_models/sub/wan.safetensors",
        "vae/v.safetensors",
        "loras/l.safetensors",
    ):
        path = models / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    (output / "flashgrpo" / "prompts").mkdir(parents=True)
    (output / "flashgrpo" / "prompts" / "p.txt").write_text("a\nb\n")
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    return output, models


def tables(**model: Any) -> dict[str, dict[str, Any]]:
    files = {"transformer": "sub/wan.safetensors", "vae": "v.safetensors"}
    return {"model": {**files, **model}, "prompts": {"file": "flashgrpo/prompts/p.txt"}}


def resolve(place: tuple[Path, Path], made: dict[str, Any]) -> Any:
    output, models = place
    return job_config(Job("0" * 32, "1", "run", made), output, [models])


def test_names_become_files_of_this_machine(place: tuple[Path, Path]) -> None:
    output, models = place
    config = resolve(
        place, tables(frozen_loras=[{"file": "l.safetensors"}], text_encoder="clip:0123")
    )
    assert config.model.transformer == str(models / "diffusion_models/sub/wan.safetensors")
    assert config.model.frozen_loras[0]["file"] == str(models / "loras/l.safetensors")
    assert config.model.text_encoder == "clip:0123"
    assert config.run.output == str(output) and config.run.name == "run"

    def name_of(kind: str, path: str) -> str:
        folder = {"transformer": "diffusion_models", "vae": "vae", "lora": "loras"}[kind]
        return Path(path).relative_to(models / folder).as_posix()

    again = portable(config, output, name_of)
    assert again["model"]["transformer"] == "sub/wan.safetensors"
    assert again["prompts"]["file"] == "flashgrpo/prompts/p.txt" and "output" not in again["run"]
    assert to_tables(resolve(place, again)) == to_tables(config)


def test_files_of_rewards_are_named_too(place: tuple[Path, Path]) -> None:
    output, models = place
    config = build_config(TINY)
    gate = {"name": "y", "model": str(models / "loras/l.safetensors")}
    file = str(models / "vae/v.safetensors")
    config.reward.terms = [{"name": "x", "model": file, "how": "mean", "gate": gate}]
    made = portable(config, output, lambda kind, path: Path(path).relative_to(models).as_posix())
    assert made["reward"]["terms"][0] == {
        "name": "x",
        "model": "models:vae/v.safetensors",
        "how": "mean",
        "gate": {"name": "y", "model": "models:loras/l.safetensors"},
    }
    assert resolve(place, made).reward.terms == config.reward.terms


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (tables(transformer="../secret.safetensors"), "`..`"),
        (tables(transformer="/etc/passwd"), "absolute"),
        (tables(vae="C:/v.safetensors"), "absolute"),
        (tables(vae="link.safetensors"), "outside the folders of this worker"),
        (tables(vae="nothing.safetensors"), "is in none of this worker's folders"),
        (tables(continue_from="../secret.safetensors"), "`..`"),
        (tables(frozen_loras=[{"file": "../../secret.safetensors"}]), "`..`"),
        (tables() | {"prompts": {"file": "../secret.safetensors"}}, "`..`"),
        (tables() | {"prompts": {"test_file": "link.txt"}}, "leads out of"),
        (tables() | {"reward": {"terms": [{"name": "x", "model": "/etc/passwd"}]}}, "is a path"),
        (tables() | {"reward": {"terms": [{"name": "x", "model": "a/../b"}]}}, "is a path"),
        (tables() | {"reward": {"terms": [{"name": "x", "url": "http://x"}]}}, "is an address"),
        (tables() | {"eval": {"terms": [{"name": "x", "m": "models:../s"}]}}, "`..`"),
        (tables() | {"code": {"x": 1}}, "unknown table"),
        (tables(command="rm"), "unknown setting"),
    ],
)
def test_nothing_outside_the_folders(
    place: tuple[Path, Path], made: dict[str, Any], words: str
) -> None:
    output, models = place
    os.symlink(output.parent / "secret.safetensors", models / "vae" / "link.safetensors")
    os.symlink(output.parent / "secret.safetensors", output / "link.txt")
    with pytest.raises(FlashGRPOError, match=words):
        resolve(place, made)


def test_start_images_are_inside_too(place: tuple[Path, Path]) -> None:
    output, models = place
    path = output / "flashgrpo" / "prompts" / "i.jsonl"
    made = tables() | {"prompts": {"file": "flashgrpo/prompts/i.jsonl"}}
    path.write_text(json.dumps({"prompt": "a", "image": str(models / "vae/v.safetensors")}) + "\n")
    resolve(place, made)
    path.write_text(json.dumps({"prompt": "a", "image": "../../../secret.safetensors"}) + "\n")
    with pytest.raises(FlashGRPOError, match="lies outside the folders"):
        resolve(place, made)


def test_a_prompts_file_outside_is_not_sent(place: tuple[Path, Path]) -> None:
    config = build_config(TINY)
    config.prompts.file = str(place[1] / "vae" / "v.safetensors")
    with pytest.raises(FlashGRPOError, match="lies outside"):
        portable(config, place[0], lambda kind, path: path)


GOOD = {
    "schema": 1,
    "id": "0" * 32,
    "version": "0.1.0",
    "run": "run",
    "submitted": "2026-01-01T00:00:00.000Z",
    "embeddings": "",
    "config": TINY,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2, "version": "9.9"}, "schema 2 .written by version 9.9.*reads 1"),
        ({"command": "x"}, "unknown field 'command'"),
        ({"run": "../x"}, "run name"),
        ({"run": 3}, "run must be text"),
        ({"id": "../x"}, "hexadecimal"),
        ({"embeddings": "../x.safetensors"}, "name of a .safetensors file"),
        ({"config": {"model": 3}}, "table of tables"),
        ({"version": "x" * MAX_BYTES}, "the limit is"),
    ],
)
def test_job_files_are_checked(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(GOOD))
    assert read_job(path).run == "run"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(FlashGRPOError, match=words):
        read_job(path)


def test_embeddings_travel_without_their_padding(tmp_path: Path) -> None:
    texts = {"a": torch.randn(3, 4096), "b": torch.randn(40, 4096)}
    path = tmp_path / "e.safetensors"
    write_embeddings(path, texts, {t: len(e) for t, e in texts.items()}, texts.__getitem__)
    found = ReadyEmbeddings(path, ["a", "b", "missing"], 32)
    assert list(found) == ["a", "b"] and "missing" not in found
    assert torch.equal(found["a"][:3], texts["a"]) and not found["a"][3:].any()
    assert torch.equal(found["b"], texts["b"][:32])
    assert found["a"].shape == (32, 4096)


def test_the_embedded_model_needs_no_folder(tmp_path: Path) -> None:
    config = job_config(Job("0" * 32, "1", "run", TINY), tmp_path, [])
    assert config.model.transformer == embedded.TINY
