"""Whole runs with the options of the method: they resume to the bytes of an undisturbed run."""

from __future__ import annotations

import json

import pytest

from flashgrpo_core.build import plan
from flashgrpo_core.runs.checkpoint import load_checkpoint
from flashgrpo_core.runs.events import read_events
from flashgrpo_core.training import train
from tests.training._small import Recorder

METHODS = {
    "nft": {
        "loss": {"algorithm": "nft", "nft_levels": 1, "kl": 1e-3},
        "rollout": {"noise": "independent"},
        "optim": {"updates_per_rollout": 2},
    },
    "adaptive": {
        "schedule": {"adaptive": True},
        "loss": {"freeze_std": True, "ratio": "guard", "mask": "kl"},
        "optim": {"updates_per_rollout": 2},
        "prompts": {"sampling": "adaptive"},
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_runs_resume_to_the_same_bytes(small_config, method: str) -> None:
    tables = {"eval": {"every": 0, "test_prompts": 0}, "run": {"iterations": 3}} | METHODS[method]
    whole = train(small_config("whole", **tables))
    stopped = train(small_config("cut", **tables), Recorder(("update", 2), 1))
    assert stopped.status == "stopped" and stopped.iteration == 1
    resumed = train(small_config("cut", **tables))
    for path in (whole.folder / "checkpoints" / "000003").iterdir():
        other = resumed.folder / "checkpoints" / "000003" / path.name
        assert path.read_bytes() == other.read_bytes(), path.name
    tensors, state = load_checkpoint(whole.folder / "checkpoints" / "000003")
    assert state["optimizer_steps"] == 6 and any(bool(t.any()) for t in tensors["adapter"].values())
    events = [e for e in read_events(whole.folder / "events.jsonl") if e["event"] == "iteration"]
    planned = plan(small_config("whole", **tables))
    rows = [json.loads(r) for r in (whole.folder / "rewards.jsonl").read_text().splitlines()]
    if method == "nft":
        # 4 videos of 10 steps; two updates with a forward and backward (3) and a reference (1) each.
        assert [e["forwards_total"] for e in events] == [
            i * (4 * 10 + 2 * 4 * 4) for i in (1, 2, 3)
        ]
        assert planned.forwards_per_iteration == 40 and planned.train_forwards_per_iteration == 4
        assert all(row["sde_step"] is None and row["sigma"] is None for row in rows)
        assert all(e["kl"] >= 0 and e["ratio_drift"] == 0 for e in events)
    else:
        assert state["prompt_position"] >= 6 and state["advantage_stds"]
        assert float(tensors["signals"]["weight"].sum()) > 3
        assert {row["sde_step"] for row in rows} <= set(range(5))


def test_kl_counts_once_the_held_out_reward_falls(small_config) -> None:
    """Trained on the opposite of what is judged, the policy does get worse."""
    config = small_config(
        reward={"terms": [{"name": "tiny_world", "weight": -1.0}]},
        loss={"kl_on_drop": 0.5},
        eval={"every": 1, "test_prompts": 0, "terms": [{"name": "tiny_world"}], "weights": "live"},
        optim={"learning_rate": 1e-2},
        run={"iterations": 5},
    )
    result = train(config)
    events = read_events(result.folder / "events.jsonl")
    judged = {e["iteration"]: e for e in events if e["event"] == "evaluation"}
    warned = [e["iteration"] for e in events if e.get("code") == "kl_on"]
    assert len(warned) == 1 and 0 < warned[0] < 5, judged
    since = warned[0]
    for iteration in range(1, since + 1):
        best = max(judged[i]["reward_mean"] for i in range(iteration))
        width = (judged[iteration]["ci_high"] - judged[iteration]["ci_low"]) / 2
        fell = best - judged[iteration]["reward_mean"] > width
        assert fell == (iteration == since)
    kl = {e["iteration"]: e["kl"] for e in events if e["event"] == "iteration"}
    assert all((value > 0) == (iteration > since) for iteration, value in kl.items())
    assert load_checkpoint(result.folder / "checkpoints" / "000005")[1]["kl_since"] == since
