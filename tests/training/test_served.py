"""Training on served rewards: mixed with local ones, with servers that die, and once per machine.

Locks in: a run with served, local and gated terms finishes and shows each term; one of two servers
that is killed costs nothing; with none left the run stops, and goes on from there later.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashgrpo_core import cli
from flashgrpo_core.config_io import dump_toml
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import servers
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.training import train
from tests.training._small import Recorder
from tests.unit._reward_server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
NO_EVAL: dict[str, Any] = {"every": 0, "test_prompts": 0}


class Killer(Recorder):
    """Kills servers when an iteration is done."""

    def __init__(self, iteration: int, *processes: ServerProcess) -> None:
        super().__init__()
        self.iteration = iteration
        self.processes = processes

    def event(self, record: dict[str, Any]) -> None:
        super().event(record)
        if record["event"] == "iteration" and record["iteration"] == self.iteration:
            for process in self.processes:
                process.kill()


@pytest.fixture
def servers_file(tmp_path: Path) -> Any:
    before = servers.servers_file()
    servers.use_file(tmp_path / "servers.json")
    yield tmp_path / "servers.json"
    servers.use_file(before)


def test_served_local_and_gated_terms_from_the_command_line(small_config, tmp_path):
    with ServerProcess() as server:
        terms = [
            {"name": "served", "reward": "brightness", "url": server.url},
            {"name": "motion", "weight": 0.5, "gate": {"name": "technical", "above": 0.0}},
        ]
        job = tmp_path / "run.toml"
        config = small_config(
            reward={"terms": terms, "overlap": True},
            run={"iterations": 2},
            eval={"every": 2, "prompts": 1, "test_prompts": 1},
        )
        job.write_text(dump_toml(config), encoding="utf-8")
        assert cli.main(["train", str(job)]) == 0
        health = server.health()
    # Two iterations of four videos, and the held-out ones.
    assert health["scored"] >= 8 and health["failed"] == 0
    folder = tmp_path / "flashgrpo" / "runs" / "run"
    events = read_events(folder / "events.jsonl")
    iterations = [e for e in events if e["event"] == "iteration"]
    assert [set(e["reward"]["terms"]) for e in iterations] == [{"served:brightness", "motion"}] * 2
    assert all(e["masked"] == 0 for e in iterations)
    assert all(0 < e["reward"]["terms"]["served:brightness"] <= 1 for e in iterations)
    judged = [e for e in events if e["event"] == "evaluation"]
    assert all("served:brightness" in e["terms"] for e in judged)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "served:brightness" in page and "Timeline" in page
    assert list((folder / "lora").glob("*.safetensors"))


def test_servers_that_die(small_config, servers_file):
    first, second, third = (ServerProcess() for _ in range(3))
    with first, second, third:

        def listed(*urls: str) -> None:
            servers_file.write_text(json.dumps({"pair": {"url": list(urls)}}))

        listed(first.url, second.url)
        term = {"name": "served", "server": "pair", "attempts": 2}
        config = small_config(reward={"terms": [term]}, eval=NO_EVAL, run={"iterations": 2})
        result = train(config, Killer(1, first))
        assert result.status == "finished"
        records = [e for e in read_events(result.folder / "events.jsonl") if "masked" in e]
        assert [e["masked"] for e in records] == [0, 0]
        # Nobody left: it stops with the reason, and what was trained stays.
        config.run.iterations = 4
        with pytest.raises(FlashGRPOError, match="4 of 4 videos have no score") as caught:
            train(config, Killer(3, second))
        assert "then resume" in str(caught.value)
        listed(third.url)
        assert train(config).iteration == 4
        assert third.health()["scored"] == 4


def test_a_reward_that_is_loaded_once_per_machine(small_config, tmp_path):
    """Two ranks share one reward, with the bytes of a single process that has its own."""
    digests = []
    for processes in (1, 2):
        term = {"name": "brightness", "once_per_node": True}
        config = small_config(
            f"world{processes}",
            reward={"terms": [term, {"name": "contrast"}]},
            eval=NO_EVAL,
            model={"device": "cpu"},
            run={"iterations": 1},
        )
        if processes == 1:
            assert train(config).status == "finished"
        else:
            path = tmp_path / "shared.toml"
            path.write_text(dump_toml(config), encoding="utf-8")
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launch, "--nproc_per_node", "2", "-m", "flashgrpo_core", "train", str(path)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-3000:]
        folder = tmp_path / "flashgrpo" / "runs" / f"world{processes}"
        adapter = folder / "checkpoints" / "000001" / "adapter.safetensors"
        digests.append(hashlib.sha256(adapter.read_bytes()).hexdigest())
        events = read_events(folder / "events.jsonl")
        (record,) = [e for e in events if e["event"] == "iteration"]
        assert set(record["reward"]["terms"]) == {"brightness", "contrast"}
    assert digests[0] == digests[1]
