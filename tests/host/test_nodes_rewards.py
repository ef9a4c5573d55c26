"""Score Videos, and rewards that are composed by links, in the real server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import ComfyServer, PromptError
from node_graphs import Graph, node, step_graph

from flashgrpo_core.ranking import Clip, rank_videos
from flashgrpo_core.rewards import RewardMix
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.video import read_video, write_mp4


def moving(step: int, noise: float = 0.0) -> np.ndarray:
    """A square on a plain ground, 9 frames of 64x64."""
    video = np.full((9, 64, 64, 3), 60, np.float64)
    for t in range(9):
        video[t, 20:40, 6 + step * t : 26 + step * t] = (220, 90, 60)
    video += np.random.default_rng(0).normal(0, noise, video.shape) if noise else 0
    return np.clip(video, 0, 255).round().astype(np.uint8)


@pytest.fixture(scope="module")
def server(probe_server: ComfyServer) -> ComfyServer:
    folder = probe_server.input / "clips ü"
    for name, video in {
        "moving": moving(3),
        "still": moving(0),
        "grainy": moving(3, 25),
    }.items():
        write_mp4(folder / f"{name}.mp4", video, 8)
    (folder / "still.txt").write_text("a red square that rests", encoding="utf-8")
    return probe_server


def graph(reward: Graph, last: str, **inputs: Any) -> Graph:
    values = {
        "reward": [last, 0],
        "folder": "input/clips ü",
        "prompt": "a red square moves",
        "on_nan": "auto",
        "max_frames": 241,
    }
    return {
        **reward,
        "rank": node("FlashGRPOScoreVideos", **{**values, **inputs}),
        "text": node("PreviewAny", source=["rank", 1]),
    }


def technical(**changes: Any) -> dict[str, Any]:
    faults = dict.fromkeys(("blur", "noise", "exposure", "flicker", "freeze", "blocks"), 1.0)
    return node(
        "FlashGRPORewardTechnical", **{"weight": 1.0, **faults, "short_side": 512, **changes}
    )


def motion(**changes: Any) -> dict[str, Any]:
    inputs = {"weight": 1.0, "enough": 0.5, "short_side": 128, "part": "total"}
    return node("FlashGRPORewardMotion", **{**inputs, **changes})


MIX: Graph = {
    "technical": technical(),
    "motion": motion(),
    "gate": node(
        "FlashGRPORewardGate",
        reward=["motion", 0],
        gate=["technical", 0],
        passes="above",
        threshold=0.25,
        otherwise=-1.0,
        previous=["technical", 0],
    ),
}
TERMS = [
    {"name": "technical", "weight": 1.0, "noise": 1.0, "exposure": 1.0, "flicker": 1.0}
    | {"freeze": 1.0, "blocks": 1.0},
    {"name": "motion", "weight": 1.0},
]


def rows(result: Any) -> list[list[str]]:
    text = result.outputs["text"]["text"][0]
    return [line.split("\t") for line in text.splitlines()]


def test_a_folder_is_ranked_as_on_the_command_line(server: ComfyServer) -> None:
    result = server.queue(
        {**graph(MIX, "gate"), "save": node("SaveVideo", video=["rank", 2], **_SAVE)}
    )
    head, *ranked = rows(result)
    assert head == ["rank", "video", "total", "technical", "motion"]
    gate = {**TERMS[0], "above": 0.25, "otherwise": -1.0}
    del gate["weight"]
    terms = [TERMS[0], {**TERMS[1], "gate": gate}]
    files = sorted((server.input / "clips ü").glob("*.mp4"))
    clips = [Clip(f.name, "", lambda f=f: read_video(f)) for f in files]
    wanted = rank_videos(clips, RewardMix(terms))
    assert [row[1] for row in ranked] == [r.clip.name for r in wanted]
    for row, r in zip(ranked, wanted, strict=True):
        assert [float(v) for v in row[2:]] == pytest.approx([r.total, *r.terms.values()], rel=1e-4)
    assert ranked[0][1] == "moving.mp4"
    assert ranked[2][4] == "-1", "the gate is closed for the worst"
    assert len(result.outputs["rank"]["images"]) == 1
    (saved,) = server.output.glob("best*.mp4")
    assert len(read_video(saved)[0]) == 9


_SAVE = {"filename_prefix": "best", "format": "auto", "codec": "auto"}


def test_linked_videos_and_their_folder_are_one_ranking(server: ComfyServer) -> None:
    write_mp4(server.input / "linked.mp4", moving(1), 8)
    reward = {"motion": motion(part="speed")}
    load = {"load": node("LoadVideo", file="linked.mp4")}
    both = {**load, **graph(reward, "motion", videos=["load", 0])}
    ranked = rows(server.queue(both))[1:]
    assert [row[1] for row in ranked][-1] == "still.mp4"
    assert {row[1] for row in ranked} == {"video 1", "moving.mp4", "still.mp4", "grainy.mp4"}
    alone = {**load, **graph(reward, "motion", videos=["load", 0], folder="")}
    head, only = rows(server.queue(alone))
    assert head[3] == "motion.smooth" or head[3] == "motion.speed"
    assert only[1] == "video 1" and 0.05 < float(only[2]) < 0.3  # 1 pixel of 64 at 8 fps: 0.125


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": "input/../../secret"}, "holds `..`"),
        ({"folder": "/etc"}, "must be input or output"),
        ({"folder": "models/vae"}, "must be input or output"),
        ({"folder": "output/none such"}, "does not exist"),
        ({"folder": ""}, "no video to score"),
        ({"on_nan": "skip"}, "is not in the list"),
        ({"max_frames": 0}, "smaller than min"),
    ],
)
def test_bad_inputs_are_named(server: ComfyServer, change: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError) as error:
        server.queue(graph({"motion": motion()}, "motion", **change))
    assert message in f"{error.value} {error.value.details}"


def test_a_step_on_win_rates_gates_and_diversity(server: ComfyServer) -> None:
    """Group-wise rewards inside the five verbs; every term is logged."""
    job = step_graph("composed")
    job["tiny"] = job["reward"]
    job["wins"] = node("FlashGRPORewardWinRate", reward=["tiny", 0])
    job["diverse"] = node("FlashGRPORewardDiversity", weight=0.2, scale=0.1)
    job["reward"] = node(
        "FlashGRPORewardGate",
        reward=["diverse", 0],
        gate=["tiny", 0],
        passes="above",
        threshold=0.1,
        otherwise=0.0,
        previous=["wins", 0],
    )
    server.queue(job)
    events = read_events(server.output / "flashgrpo" / "runs" / "composed" / "events.jsonl")
    terms = next(e for e in events if e["event"] == "iteration")["reward"]["terms"]
    assert terms["tiny_world.win_rate"] == pytest.approx(0.5)
    assert 0 < terms["tiny_world"] < 1 and 0 <= terms["diversity"] < 1


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            {"one": motion(), "two": motion(previous=["one", 0])}
            | {"last": {"gate": ["two", 0], "reward": ["one", 0]}},
            "the gate is a chain of 2 rewards",
        ),
        (
            {"one": motion(), "d": node("FlashGRPORewardDiversity", weight=1.0, scale=0.1)}
            | {"last": {"gate": ["d", 0], "reward": ["one", 0]}},
            "cannot be a gate",
        ),
        (
            {"one": motion(), "w": node("FlashGRPORewardWinRate", reward=["one", 0])}
            | {"last": {"gate": ["w", 0], "reward": ["one", 0]}},
            "has a group: link the plain reward",
        ),
    ],
)
def test_gates_that_make_no_sense_fail_on_their_node(
    server: ComfyServer, nodes: dict[str, Any], message: str
) -> None:
    last = {"passes": "above", "threshold": 0.5, "otherwise": 0.0, **nodes.pop("last")}
    job = graph({**nodes, "last": node("FlashGRPORewardGate", **last)}, "last")
    error = server.wait(server.submit(job)).error
    assert error is not None and error["node_type"] == "FlashGRPORewardGate"
    assert message in error["exception_message"]


def test_without_installed_rewards_the_node_says_so(server: ComfyServer) -> None:
    job = graph(
        {"own": node("FlashGRPORewardInstalled", weight=1.0, name="none installed", options="")},
        "own",
    )
    error = server.wait(server.submit(job)).error
    assert (
        error is not None and "no installed package offers a reward" in error["exception_message"]
    )
