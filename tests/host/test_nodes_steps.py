"""The five verbs as separate nodes: queueing again goes on, branches do not disturb each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import ComfyServer
from node_graphs import checkpoint_state, node, step_graph, train_graph, train_step
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def stepped(probe_server: ComfyServer) -> ComfyServer:
    """Two queues of the same graph, with a LoRA saved after each step."""
    for turn in (1, 2):
        graph = step_graph("stepped")
        graph["save"] = node(
            "FlashGRPOSaveLora",
            lora=["step", 0],
            name=f"stepped/turn{turn}",
            key_format="comfyui",
            weights="live",
        )
        result = probe_server.queue(graph)
        # What depends on the policy ran again; the rest came from the cache, in the first turn
        # too when another test has queued the same nodes.
        independent = {"prompts", "video", "reward"}
        assert result.cached <= independent
        assert turn == 1 or result.cached == independent
    return probe_server


def lora(server: ComfyServer, name: str) -> Path:
    return server.output / "loras" / f"{name}.safetensors"


def test_queueing_twice_makes_two_different_steps(stepped: ComfyServer) -> None:
    first, second = (load_file(lora(stepped, f"stepped/turn{turn}")) for turn in (1, 2))
    assert first.keys() == second.keys()
    assert any(not first[key].equal(second[key]) for key in first)
    assert checkpoint_state(stepped.output, "stepped", 1)["optimizer_steps"] == 1
    assert checkpoint_state(stepped.output, "stepped", 2)["optimizer_steps"] == 2


def test_the_steps_are_those_of_train(stepped: ComfyServer) -> None:
    """The graph and the loop are one method: the same settings give the same bits."""
    stepped.queue(train_graph("looped", iterations=2, evaluate_every=0))
    for iteration in (1, 2):
        separate = checkpoint_state(stepped.output, "stepped", iteration)
        looped = checkpoint_state(stepped.output, "looped", iteration)
        assert separate["weights"] == looped["weights"]
        assert separate["forwards_total"] == looped["forwards_total"]


def test_load_in_one_queue_and_step_in_the_next(stepped: ComfyServer) -> None:
    """Networks that were loaded for an earlier prompt train as well as fresh ones."""
    graph = step_graph("halved")
    first = {key: graph[key] for key in ("policy", "prompts", "video", "groups", "rollout")}
    first["show"] = node("PreviewImage", images=["rollout", 2])
    stepped.queue(first)
    result = stepped.queue(graph)
    assert {"policy", "groups", "rollout"} <= result.cached
    whole = checkpoint_state(stepped.output, "stepped", 1)["weights"]
    assert checkpoint_state(stepped.output, "halved", 1)["weights"] == whole


def test_two_steps_from_one_policy_are_two_branches(stepped: ComfyServer) -> None:
    """The second becomes a run of its own; neither changes the other."""
    graph = step_graph("branched")
    graph["other"] = train_step(learning_rate=1e-3)
    stepped.queue(graph)
    runs = {run["name"]: run for run in stepped.get("/flashgrpo/runs")}
    assert {"branched", "branched-2"} <= runs.keys()
    states = [checkpoint_state(stepped.output, name, 1) for name in ("branched", "branched-2")]
    # One of the two, whichever ran first, used the graph's own learning rate.
    alone = checkpoint_state(stepped.output, "stepped", 1)["weights"]
    assert [state["weights"] == alone for state in states].count(True) == 1
    assert all(state["optimizer_steps"] == 1 for state in states)


def test_scores_of_another_policy_are_refused(stepped: ComfyServer) -> None:
    graph = step_graph("mine")
    graph["foreign"] = {**graph["policy"], "inputs": {**graph["policy"]["inputs"]}}
    graph["foreign"]["inputs"]["run_name"] = "stepped"
    graph["step"]["inputs"]["policy"] = ["foreign", 0]
    error = stepped.wait(stepped.submit(graph)).error
    assert error is not None and error["node_type"] == "FlashGRPOTrainStep"
    assert (
        "run 'mine' at iteration 0, the policy is run 'stepped' at 2" in error["exception_message"]
    )


def test_equal_rewards_stop_with_advice(stepped: ComfyServer) -> None:
    graph = step_graph("flat")
    # A weight of zero: whatever is measured, all videos are worth the same.
    graph["reward"] = node("FlashGRPORewardFlicker", weight=0.0, tolerance=255.0)
    error = stepped.wait(stepped.submit(graph)).error
    assert error is not None and error["node_type"] == "FlashGRPOScore"
    assert "no signal" in error["exception_message"]
    assert "raise group_size" in error["exception_message"]


def test_pictures_and_videos_reach_the_user(stepped: ComfyServer) -> None:
    graph = step_graph("shown")
    graph["files"] = node(
        "SaveVideo", video=["rollout", 1], filename_prefix="shown", format="auto", codec="auto"
    )
    result = stepped.queue(graph)
    for name in ("groups", "rollout", "score", "step"):
        assert len(result.outputs[name]["images"]) == 1, name
    assert len(list(stepped.output.glob("shown*.mp4"))) == 8


def test_a_third_step_after_a_restart(stepped: ComfyServer) -> None:
    """State lives on disk only: AdamW goes on with step 3."""
    stepped.restart()
    stepped.queue(step_graph("stepped"))
    assert checkpoint_state(stepped.output, "stepped", 3)["optimizer_steps"] == 3
    weights = {checkpoint_state(stepped.output, "stepped", i)["weights"] for i in (1, 2, 3)}
    assert len(weights) == 3
