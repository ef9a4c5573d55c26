"""Served rewards in ComfyUI: servers by name from the user's file, and the pack without network code.

Locks in: no workflow can name an address; the registry's archive keeps the nodes and says what is
missing; a chain of served, gated and local rewards trains.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import ComfyServer, PromptError
from node_graphs import node, train_graph

from flashgrpo_core.runs.events import read_events
from tests.unit._reward_server import ServerProcess

FILE = "flashgrpo_servers.json"


def served(**changes: Any) -> dict[str, Any]:
    inputs = {
        "weight": 1.0,
        "server": "bright",
        "reward": "brightness",
        "encoding": "safetensors",
        "timeout": 60.0,
    }
    return node("FlashGRPORewardServed", **{**inputs, **changes})


def failure(server: ComfyServer, reward: dict[str, Any]) -> str:
    """What the reward node says."""
    graph = train_graph("refused") | {"reward": reward}
    error = server.wait(server.submit(graph)).error
    assert error is not None and error["node_type"] == reward["class_type"], error
    return str(error["exception_message"])


@pytest.fixture(scope="module")
def rewards() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


@pytest.fixture(scope="module")
def networked(make_server: Callable[..., ComfyServer], rewards: ServerProcess) -> ComfyServer:
    """ComfyUI with the whole pack, and a servers file in its user folder."""
    server = make_server(network=True)
    (server.user / FILE).write_text(json.dumps({"bright": {"url": rewards.url}}))
    return server


def test_the_archive_keeps_the_nodes_and_says_what_is_missing(comfy_server: ComfyServer) -> None:
    assert "git clone" in failure(comfy_server, served())
    judge = {"weight": 1.0, "server": "x", "rubric": "points", "question": "", "frames": 8}
    reward = node("FlashGRPORewardJudge", **judge, timeout=60.0)
    assert "git clone" in failure(comfy_server, reward)
    described = comfy_server.get("/object_info/FlashGRPORewardServed")["FlashGRPORewardServed"]
    (choice,) = described["input"]["required"]["server"][1]["options"]
    assert "git clone" in failure(comfy_server, served(server=choice))


def test_servers_are_listed_by_name(networked: ComfyServer) -> None:
    described = networked.get("/object_info/FlashGRPORewardServed")["FlashGRPORewardServed"]
    assert "bright" in json.dumps(described["input"]["required"]["server"])
    assert "http" not in json.dumps(described)
    judge = networked.get("/object_info/FlashGRPORewardJudge")["FlashGRPORewardJudge"]
    assert f"none: write user/{FILE}" in json.dumps(judge["input"]["required"]["server"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"server": "http://10.0.0.1:80"}, "is not in the list: choose one of bright"),
        ({"server": "../../evil"}, "is not in the list"),
        ({"timeout": float("1e9")}, "outside 1.0 to 86400.0"),
    ],
)
def test_no_workflow_names_an_address(
    networked: ComfyServer, rewards: ServerProcess, changes: dict[str, Any], reason: str
) -> None:
    before = rewards.health()["scored"]
    try:
        assert reason in failure(networked, served(**changes))
    except PromptError as exc:  # ComfyUI's own checks were faster
        assert reason not in str(exc)
    assert rewards.health()["scored"] == before


def test_no_request_writes_the_servers_file(networked: ComfyServer) -> None:
    before = (networked.user / FILE).read_bytes()
    for name in (f"..%2F{FILE}", f"..%2F..%2Fuser%2F{FILE}"):
        url = f"{networked.url}/userdata/{name}?overwrite=true"
        request = urllib.request.Request(url, b'{"evil": {"url": "http://evil"}}', method="POST")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=10)
    assert (networked.user / FILE).read_bytes() == before


def test_served_gated_and_local_rewards_train(
    networked: ComfyServer, rewards: ServerProcess
) -> None:
    graph = train_graph("served", iterations=1, evaluate_every=0)
    graph["advanced"]["inputs"] |= {"test_prompts": 0}
    graph["motion"] = node("FlashGRPORewardMotion", weight=0.5, enough=0.5, short_side=128)
    graph["quality"] = node("FlashGRPORewardFlicker", weight=1.0, tolerance=4.0)
    graph["gated"] = node(
        "FlashGRPORewardGate",
        reward=["motion", 0],
        gate=["quality", 0],
        passes="above",
        threshold=0.0,
        otherwise=0.0,
    )
    graph["reward"] = served(previous=["gated", 0], url="http://127.0.0.1:9")
    before = rewards.health()["scored"]
    networked.queue(graph)
    assert rewards.health()["scored"] == before + 8
    events = read_events(networked.output / "flashgrpo" / "runs" / "served" / "events.jsonl")
    (record,) = [e for e in events if e["event"] == "iteration"]
    assert set(record["reward"]["terms"]) == {"motion", "served:brightness"}
    assert record["masked"] == 0
    # What is no input of the node does not reach it, and the run's settings hold the name of the server, not its address.
    settings = (networked.output / "flashgrpo" / "runs" / "served" / "config.toml").read_text()
    assert "bright" in settings and str(rewards.port) not in settings


def test_a_server_that_is_gone_stops_the_run_with_advice(networked: ComfyServer) -> None:
    path = networked.user / FILE
    listed = path.read_text()
    path.write_text(json.dumps({"bright": {"url": "http://127.0.0.1:9"}}))
    try:
        graph = train_graph("gone", iterations=1, evaluate_every=0)
        graph["reward"] = served(weight=2.0)
        error = networked.wait(networked.submit(graph)).error
    finally:
        path.write_text(listed)
    assert error is not None and "8 of 8 videos have no score" in error["exception_message"]
