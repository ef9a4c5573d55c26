"""Dealing work, joining the launched processes, and noticing that training stands still.

Locks in: no rank gets more than it must, whatever the numbers; a process that would silently train
alone is an error; a stall is named once, with process and phase.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgrpo_core.config_io import build_config
from flashgrpo_core.control import Control
from flashgrpo_core.distributed import World, even_cuts
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.forwards import rollout_forwards, share_cost
from flashgrpo_core.groups import make_groups
from flashgrpo_core.launch import launched_world
from flashgrpo_core.rollout import RolloutSettings, sample_shares
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.watchdog import Watchdog

LAUNCH = Path(__file__).resolve().parents[2] / "docs" / "launch"


@given(st.integers(0, 40), st.integers(1, 9))
def test_equal_items_are_dealt_evenly(count: int, parts: int) -> None:
    cuts = even_cuts(range(count), parts, lambda item, before: 1)
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    assert sum(sizes) == count and len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_no_other_cut_has_a_cheaper_dearest_part(items: list[tuple[int, int]], parts: int) -> None:
    """With a start cost per group, as the common prefix of a group's videos is."""
    items.sort()
    start = (5, 2, 7)

    def cost(item: tuple[int, int], before: tuple[int, int] | None) -> int:
        return item[1] + (start[item[0]] if before is None or before[0] != item[0] else 0)

    def dearest(cuts: list[int]) -> int:
        return max(
            sum(cost(items[k], items[k - 1] if k > a else None) for k in range(a, b))
            for a, b in itertools.pairwise(cuts)
        )

    inner = itertools.combinations_with_replacement(range(len(items) + 1), parts - 1)
    assert dearest(even_cuts(items, parts, cost)) == min(
        dearest([0, *cuts, len(items)]) for cuts in inner
    )


@pytest.mark.parametrize("noise", ["shared", "independent"])
def test_the_cost_of_all_shares_is_what_the_phase_counts(noise: str) -> None:
    groups = make_groups(
        ["a cat", "a dog", "a hen"], iteration=1, run_seed=5, group_size=5, window=(0, 5),
        draw="stratified", noise=noise, start_images=[None] * 3,
    )  # fmt: skip
    sizes = RolloutSettings((16, 3, 8, 8), micro_batch=2)
    shares, cost = sample_shares(groups, 2), share_cost(groups, 10, sizes)
    total = sum(cost(share, shares[i - 1] if i else None) for i, share in enumerate(shares))
    assert total == rollout_forwards(groups, make_schedule("simple", 10, 3.0), sizes)


# --- joining -------------------------------------------------------------------------------------


def config(**run: int):
    return build_config({"model": {"transformer": "tiny", "device": "cpu"}, "run": run})


def test_a_world_size_without_a_launcher_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens with `srun python -m ...`: every task would train the same run alone."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(FlashGRPOError, match=r"WORLD_SIZE = 4 .* alone: use torchrun"):
        launched_world(config())


@pytest.mark.parametrize(("announced", "wanted"), [("1", 2), ("2", 4), ("4", 2)])
def test_another_number_of_processes_than_configured_is_an_error(
    monkeypatch: pytest.MonkeyPatch, announced: str, wanted: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", announced)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(
        FlashGRPOError,
        match=rf"run.processes = {wanted}, but {announced} .*--nproc_per_node {wanted}",
    ):
        launched_world(config(processes=wanted))


def test_sharding_and_offload_exclude_each_other() -> None:
    with pytest.raises(FlashGRPOError, match=r"set model.offload = false"):
        build_config({"model": {"transformer": "tiny", "shard": True, "offload": True}})


@pytest.mark.parametrize(
    ("name", "kind", "processes", "machines"),
    [
        ("one_gpu", "NO", 1, 1),
        ("eight_gpus", "MULTI_GPU", 8, 1),
        ("eight_gpus_sharded", "FSDP", 8, 1),
        ("two_machines", "MULTI_GPU", 16, 2),
    ],
)
def test_accelerate_reads_the_launch_files(
    name: str, kind: str, processes: int, machines: int
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(LAUNCH / f"{name}.yaml"))
    assert found.distributed_type == kind
    assert (found.num_processes, found.num_machines) == (processes, machines)
    assert found.mixed_precision == "no"


def test_fsdp_chosen_in_accelerate_shards_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    chosen = config()
    assert launched_world(chosen).size == 1
    assert chosen.model.shard


def test_deepspeed_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(FlashGRPOError, match=r"choose multi-GPU in accelerate config, or FSDP"):
        launched_world(config())


# --- standing still ------------------------------------------------------------------------------


def test_a_stall_is_told_once_with_process_and_phase() -> None:
    told: list[tuple[int, str, str]] = []
    with Watchdog(Control(), World(), limit=0.2, period=0.02) as watchdog:
        watchdog.warn = lambda *what: told.append(what)
        watchdog.phase("score", 4, 3)
        for _ in range(5):  # slow, but moving
            time.sleep(0.08)
            watchdog.check()
        assert told == []
        deadline = time.monotonic() + 5
        while not told and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        assert len(told) == 1
        watchdog.tick()
        time.sleep(0.1)
        while len(told) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert [(iteration, code) for iteration, code, _ in told] == [(3, "stall")] * 2
    assert "process 0 of 1 has made no step for" in told[0][2]
    assert "phase score of iteration 3" in told[0][2] and "run.stall = 0.2" in told[0][2]


def test_who_waits_is_not_to_blame_and_who_is_silent_is() -> None:
    watchdog = Watchdog(Control(), World(), limit=0.1)
    watchdog.world.size = 3
    told: list[str] = []
    watchdog.warn = lambda iteration, code, text: told.append(text)
    record = {"phase": "update", "iteration": 8, "idle": 99.0, "waiting": True, "beat": 1}
    watchdog._look(1, json.dumps(record))
    assert told == []
    watchdog._look(2, json.dumps(record | {"waiting": False}))
    assert "process 2 of 3 has made no step for 99 s in phase update of iteration 8" in told[0]
    time.sleep(0.15)
    watchdog._look(1, json.dumps(record))
    assert "process 1 of 3 has not answered for" in told[1] and "last seen in phase" in told[1]
    watchdog._look(1, json.dumps(record | {"beat": 2}))
    time.sleep(0.15)
    watchdog._look(1, json.dumps(record | {"beat": 2}))
    assert len(told) == 3
