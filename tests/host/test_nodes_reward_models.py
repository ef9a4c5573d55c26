"""Rewards with a network in the real server: found in the folders, moved by ComfyUI, let go again."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
from harness import ComfyServer, PromptError
from node_graphs import Graph, live, node, step_graph

from flashgrpo_core.rewards import RewardMix, VideoBatch
from flashgrpo_core.video import read_video, write_mp4
from tests.unit._reward_models import write_clip
from tests.unit.test_rewards_clip import write_head

COMPUTING = {"dtype": "auto", "device": "auto"}
FRAMES = {"frames": "mean", "every": 2, "batch": 3, **COMPUTING}


def pick(model: str = "a folder/PickScore_v1", **changes: Any) -> dict[str, Any]:
    return node("FlashGRPORewardPickscore", weight=1.0, model=model, **FRAMES, **changes)


@pytest.fixture(scope="module")
def server(probe_server: ComfyServer) -> ComfyServer:
    models = probe_server.models
    folder = write_clip(models / "flashgrpo_rewards" / "a folder" / "PickScore_v1")
    head = models / "flashgrpo_rewards" / "sac+logos+ava1-l14-linearMSE.pth"
    write_head(head, 24)
    # A model without a tokenizer of its own: ComfyUI's has more tokens than this small one.
    bare = models / "flashgrpo_rewards" / "bare"
    shutil.copytree(folder, bare)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (bare / name).unlink()
    return probe_server


def scoring(run: str, **rewards: Any) -> Graph:
    """The step graph up to Score Rollouts, without the step."""
    graph = step_graph(run)
    del graph["step"], graph["reward"]
    return {**graph, **rewards, "show": node("PreviewImage", images=["score", 1])}


def test_models_are_listed(server: ComfyServer) -> None:
    info = server.object_info("FlashGRPORewardPickscore")["input"]["required"]["model"][1]
    assert {"a folder/PickScore_v1", "bare"} <= set(info["options"])
    info = server.object_info("FlashGRPORewardAesthetic")["input"]["required"]["head"][1]
    assert "sac+logos+ava1-l14-linearMSE.pth" in info["options"]
    assert all("vocab" not in option for option in info["options"])


def test_scores_in_the_graph_are_those_of_the_core(server: ComfyServer) -> None:
    """Two networks take turns with the VAE under ComfyUI's memory management."""
    aesthetic = node(
        "FlashGRPORewardAesthetic",
        weight=0.5,
        model="a folder/PickScore_v1",
        head="sac+logos+ava1-l14-linearMSE.pth",
        previous=["pick", 0],
        **FRAMES,
    )
    graph = scoring("rewarded", pick=pick(), reward=aesthetic)
    before = live(server)
    server.queue(graph)
    after = live(server)
    # The VAE, the transformer and both rewards are in ComfyUI's books.
    assert after["Resident"] >= before["Resident"] + 2, (before, after)
    assert after["loaded"].count("Resident") >= 2, after["loaded"]
    again = scoring("rewarded", pick=pick(), reward=aesthetic)
    again["pick"]["inputs"]["batch"] = 2
    server.queue(again)
    assert live(server)["Resident"] == after["Resident"], "the models are loaded once"


def test_score_videos_agrees_with_the_core(server: ComfyServer) -> None:

    folder = server.input / "rated"
    rng = np.random.default_rng(1)
    for name in ("one", "two"):
        write_mp4(folder / f"{name}.mp4", rng.integers(0, 255, (5, 64, 64, 3), np.uint8), 8)
    graph: Graph = {
        "reward": pick(),
        "rank": node(
            "FlashGRPOScoreVideos",
            reward=["reward", 0],
            folder="input/rated",
            prompt="a red circle moving right",
            on_nan="auto",
            max_frames=241,
        ),
        "text": node("PreviewAny", source=["rank", 1]),
    }
    text = json.dumps(server.queue(graph).outputs)
    path = str(server.models / "flashgrpo_rewards" / "a folder" / "PickScore_v1")
    mix = RewardMix([{"name": "pickscore", "model": path, "every": 2, "device": "cpu"}])
    for name in ("one", "two"):
        video, fps = read_video(folder / f"{name}.mp4")
        batch = VideoBatch(video[None], ["a red circle moving right"], fps, ["g"])
        assert f"{mix.score(batch).total[0]:.3f}" in text, (name, mix.score(batch).total, text)


def test_what_is_missing_is_said_on_the_node(server: ComfyServer) -> None:
    def fails(reward: dict[str, Any]) -> str:
        with pytest.raises(PromptError) as caught:
            server.queue(scoring("rewarded", reward=reward))
        return str(caught.value)

    assert "not in" in fails(pick("../secrets"))
    video = node(
        "FlashGRPORewardVideoreward",
        weight=1.0,
        model="a folder/PickScore_v1",
        visual=1.0,
        motion=1.0,
        text=1.0,
        **COMPUTING,
    )
    assert "prompt_template.py is missing" in fails(video)


def test_a_failure_gives_the_memory_back(server: ComfyServer) -> None:
    """ComfyUI's tokenizer has words that the small model does not know: its forward fails."""
    with pytest.raises(PromptError):
        server.queue(scoring("rewarded", reward=pick("bare")))
    assert live(server)["Resident"] == 0
