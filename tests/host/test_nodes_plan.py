"""The Plan node in the real server."""

from __future__ import annotations

from harness import ComfyServer
from node_graphs import node, policy, video


def test_plan_says_phases_and_cards(probe_server: ComfyServer) -> None:
    graph = {
        "policy": policy("planned"),
        "video": video(),
        "plan": node("FlashGRPOPlan", policy=["policy", 0], video_settings=["video", 0], card=12),
        "text": node("PreviewAny", source=["plan", 0]),
    }
    result = probe_server.queue(graph)
    (text,) = result.outputs["plan"]["text"]
    assert result.outputs["text"]["text"] == (text,) or result.outputs["text"]["text"] == [text]
    lines = text.splitlines()
    phases = [line.split()[0] for line in lines[1 : lines.index("")]]
    assert phases == ["load", "encode", "rollout", "score", "update", "evaluate", "checkpoint"]
    assert lines[-1].split()[:3] == ["12", "GB", "yes"]
    assert not (probe_server.output / "flashgrpo" / "runs" / "planned").exists(), "nothing is made"
