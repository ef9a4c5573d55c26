"""API-format graphs of the pack's nodes on the embedded tiny Wan, at sizes a test can afford."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import ComfyServer

Graph = dict[str, dict[str, Any]]

TINY = "tiny (embedded)"
#: Six prompts: four to train on, one each held out for validation and test.
TEXT = "\n".join(
    f"a {colour} {shape} moving {direction}"
    for colour, shape, direction in (
        ("red", "circle", "left"),
        ("green", "square", "right"),
        ("blue", "triangle", "up"),
        ("yellow", "circle", "down"),
        ("magenta", "square", "left"),
        ("cyan", "triangle", "right"),
    )
)


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    """One node; links are `[id, output]`."""
    return {"class_type": kind, "inputs": inputs}


def policy(run: str, **changes: Any) -> dict[str, Any]:
    """Load Wan Policy on the tiny Wan."""
    inputs = {
        "run_name": run,
        "diffusion_model": TINY,
        "low_noise_model": "none",
        "vae": TINY,
        "dtype": "auto",
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "lora_targets": "attention",
        "continue_from": "none",
    }
    return node("FlashGRPOLoadPolicy", **{**inputs, **changes})


def prompts(**changes: Any) -> dict[str, Any]:
    """Prompts from text."""
    inputs = {
        "source": "the text below",
        "text": TEXT,
        "negative": "",
        "validation_share": 0.17,
        "test_share": 0.17,
        "text_encoder": TINY,
        "text_tokens": 0,
    }
    return node("FlashGRPOPrompts", **{**inputs, **changes})


def video(**changes: Any) -> dict[str, Any]:
    """Video Settings of the tiny Wan with few steps."""
    inputs: dict[str, Any] = dict.fromkeys(
        ("width", "height", "frames", "steps", "micro_batch", "decode_batch"), 0
    )
    inputs |= {"fps": 0.0, "shift": 0.0, "guidance": 0.0, "steps": 4}
    return node(
        "FlashGRPOVideoSettings", **{"preset": "tiny Wan, any computer", **inputs, **changes}
    )


def groups(**changes: Any) -> dict[str, Any]:
    """Iso-Temporal Groups: 2 prompts of 4 videos."""
    inputs = {
        "policy": ["policy", 0],
        "prompts": ["prompts", 0],
        "video_settings": ["video", 0],
        "group_size": 4,
        "prompts_per_iteration": 2,
        "noise": "shared",
        "window_first": 0,
        "window_end": 0,
        "seed": 3,
        "draw": "stratified",
        "sde": "flash",
        "eta": 1.0,
        "schedule": "simple",
    }
    return node("FlashGRPOGroups", **{**inputs, **changes})


def score(**changes: Any) -> dict[str, Any]:
    """Score Rollouts."""
    inputs = {
        "rollouts": ["rollout", 0],
        "reward": ["reward", 0],
        "advantage_std": "update",
        "advantage_clamp": 5.0,
        "normalise": True,
        "on_nan": "error",
    }
    return node("FlashGRPOScore", **{**inputs, **changes})


def train_step(**changes: Any) -> dict[str, Any]:
    """Train Step."""
    inputs = {
        "policy": ["policy", 0],
        "scored": ["score", 0],
        "learning_rate": -1.0,
        "clip": 0.001,
        "kl": 0.0,
        "rectification": "pool",
        "warmup": -1,
        "max_grad_norm": 0.0,
        "weight_decay": 1e-4,
        "ema_decay": 0.9,
        "updates_per_rollout": 1,
    }
    return node("FlashGRPOTrainStep", **{**inputs, **changes})


def step_graph(run: str, *, policy_inputs: dict[str, Any] | None = None) -> Graph:
    """The five verbs as separate nodes."""
    return {
        "policy": policy(run, **(policy_inputs or {})),
        "prompts": prompts(),
        "video": video(),
        "groups": groups(),
        "rollout": node("FlashGRPORollout", policy=["policy", 0], groups=["groups", 0]),
        "reward": node("FlashGRPORewardTinyWorld", weight=1.0),
        "score": score(),
        "step": train_step(),
    }


def advanced(**changes: Any) -> dict[str, Any]:
    """Advanced Training Settings: 2 prompts of 4 videos, one evaluation prompt."""
    numbers = (
        "group_size prompts_per_iteration warmup validation_prompts validation_seeds test_prompts "
        "test_seeds patience updates_per_rollout save_every keep window_first window_end"
    ).split()
    floats = (
        "learning_rate kl clip eta advantage_clamp max_grad_norm weight_decay ema_decay".split()
    )
    choices = (
        "noise draw sde schedule advantage_std rectification normalise on_nan weights "
        "gradient_checkpointing"
    ).split()
    inputs: dict[str, Any] = dict.fromkeys(numbers, -1)
    inputs |= dict.fromkeys(floats, -1.0) | dict.fromkeys(choices, "preset")
    inputs |= {
        "group_size": 4,
        "prompts_per_iteration": 2,
        "validation_prompts": 1,
        "validation_seeds": 1,
        "test_prompts": 1,
        "test_seeds": 1,
        "save_every": 1,
    }
    return node("FlashGRPOTrainAdvanced", **{**inputs, **changes})


def train(**changes: Any) -> dict[str, Any]:
    """Train for 3 iterations."""
    inputs = {
        "policy": ["policy", 0],
        "prompts": ["prompts", 0],
        "video_settings": ["video", 0],
        "reward": ["reward", 0],
        "preset": "recommended",
        "iterations": 3,
        "seed": 3,
        "evaluate_every": 3,
        "advanced": ["advanced", 0],
    }
    return node("FlashGRPOTrain", **{**inputs, **changes})


def train_graph(run: str, *, policy_inputs: dict[str, Any] | None = None, **inputs: Any) -> Graph:
    """A whole run in one node."""
    return {
        "policy": policy(run, **(policy_inputs or {})),
        "prompts": prompts(),
        "video": video(),
        "reward": node("FlashGRPORewardTinyWorld", weight=1.0),
        "advanced": advanced(),
        "train": train(**inputs),
    }


def checkpoint_state(output: Path, run: str, iteration: int) -> dict[str, Any]:
    """What a run's checkpoint says: counters, and `weights`, the SHA-256 of the LoRA."""
    folder = output / "flashgrpo" / "runs" / run / "checkpoints" / f"{iteration:06d}"
    return json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))["state"]


def live(server: ComfyServer) -> dict[str, Any]:
    """What is alive in the server's process, from the probe node."""
    _turn[0] += 1
    result = server.queue({"live": node("TestLive", turn=_turn[0])})
    return json.loads(result.outputs["live"]["text"][0])


def trouble(server: ComfyServer, work: str, *, seconds: float = 0.0, left: int = -1) -> None:
    """Slow work of a kind down, or let it run out of memory after `left` calls."""
    _turn[0] += 1
    inputs = {"work": work, "seconds": seconds, "left": left, "turn": _turn[0]}
    server.queue({"trouble": node("TestTrouble", **inputs)})


_turn = [0]
