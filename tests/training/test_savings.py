"""Cheaper rollouts in whole runs: the same LoRA where that is promised, and counts that are true."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from flashgrpo_core.build import build_prompts, build_schedule, plan, rollout_settings
from flashgrpo_core.config import Config
from flashgrpo_core.config_io import build_config, to_tables
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.forwards import rollout_forwards
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.trainer import iteration_groups
from flashgrpo_core.training import train

TABLES: dict[str, dict[str, Any]] = {
    "eval": {"every": 0, "test_prompts": 0},
    "run": {"iterations": 2},
}
CHEAP = {
    "guidance": 2.0, "guidance_interval": [0.5, 1], "suffix_share": 0.5, "cache_threshold": 0.1,
}  # fmt: skip


def adapter(folder) -> dict[str, str]:
    checkpoint = folder / "checkpoints" / "000002"
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in checkpoint.glob("*.safe*")}


def sampled(config: Config, iteration: int) -> int:
    groups = iteration_groups(config, build_prompts(config), iteration)
    return rollout_forwards(groups, build_schedule(config), rollout_settings(config))


def test_a_kept_graph_leaves_every_byte_and_saves_its_forward(small_config) -> None:
    found = {}
    for name, gib in (("again", 0.0), ("kept", 1.0)):
        config = small_config(name, **TABLES, rollout={"keep_graph": gib})
        folder = train(config).folder
        total = [
            e["forwards_total"]
            for e in read_events(folder / "events.jsonl")
            if e["event"] == "iteration"
        ]
        found[name] = (adapter(folder), total)
    assert found["again"][0] == found["kept"][0] and found["again"][0]
    first, second = sampled(config, 1), sampled(config, 2)
    # Two groups: a trained forward and backward is 3 each, 2 when the forward is the rollout's.
    assert found["again"][1] == [first + 6, first + second + 12]
    assert found["kept"][1] == [first + 4, first + second + 8]


def test_a_run_with_every_saving_counts_by_the_formula(small_config) -> None:
    config = small_config("cheap", **TABLES, rollout=CHEAP)
    events = read_events(train(config).folder / "events.jsonl")
    phases = [e for e in events if e["event"] == "phase" and e["name"] == "rollout"]
    assert [e["forwards"] for e in phases] == [sampled(config, 1), sampled(config, 2)]
    assert not [e for e in events if e["event"] == "warning"]
    expected = plan(config).forwards_per_iteration
    plain = small_config("plain", **TABLES, rollout={"guidance": 2.0})
    assert expected < 0.6 * plan(plain).forwards_per_iteration
    # The plan is the mean over the window; each iteration's two steps lie around it.
    many = [sampled(config, i) for i in range(1, 101)]
    assert sum(many) / len(many) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"rollout": {"guidance_interval": [0.9, 0.2]}}, r"guidance_interval = \[0.9, 0.2\] must"),
        ({"rollout": {"guidance_interval": [0.3]}}, "must be .low, high. with 0 <= low < high"),
        ({"rollout": {"cache_threshold": 0.1}, "model": {"shard": True}}, "cache_threshold = 0.1"),
    ],
)
def test_settings_that_cannot_work_are_named(tables: dict[str, Any], message: str) -> None:
    model = {"transformer": "tiny", **tables.get("model", {})}
    with pytest.raises(FlashGRPOError, match=message):
        build_config({**tables, "model": model})


def test_whole_numbers_are_numbers_in_a_list() -> None:
    config = build_config(
        {"model": {"transformer": "tiny"}, "rollout": {"guidance_interval": [0, 1]}}
    )
    assert to_tables(config)["rollout"]["guidance_interval"] == [0.0, 1.0]
