"""What two real processes do together; started by torchrun from `test_sharding.py`.

Each rank writes what it saw as JSON to the folder given as argument.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flashgrpo_core.config_io import build_config
from flashgrpo_core.control import Control
from flashgrpo_core.distributed import World
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.keeping import RunState, weights_hash
from flashgrpo_core.networks import load_networks
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.seeds import normal
from flashgrpo_core.sharding import load_sharded
from flashgrpo_core.watchdog import Watchdog


def main(folder: Path) -> None:
    world = World.launched(cpu=True, timeout=120)
    seen: dict[str, Any] = {"gathered": world.gather([world.rank + 1.0, 7.0]).tolist()}
    for dtype in ("fp32", "bf16"):
        seen[dtype] = sharded_against_whole(world, dtype)
    seen["stalls"] = stall(world)
    (folder / f"{world.rank}.json").write_text(json.dumps(seen))
    world.barrier()


def sharded_against_whole(world: World, dtype: str) -> dict[str, Any]:
    config = build_config(
        {
            "model": {
                "transformer": "tiny",
                "device": "cpu",
                "dtype": dtype,
                "gradient_checkpointing": True,
                "shard": True,
            }
        }
    )
    whole = load_networks(config, world.device).policy
    policy = load_sharded(config, world).policy
    assert isinstance(whole, WanPolicy) and isinstance(policy, WanPolicy)
    lora = {n: normal(tuple(p.shape), 3) / 30 for n, p in whole.parameters().items()}
    for one in (whole, policy):
        one.load(lora)
    own = {id(p) for p in policy.parameters().values()}
    frozen = [p for p in policy.transformer.parameters() if id(p) not in own]
    local = sum(p.to_local().numel() for p in frozen if isinstance(p, DTensor))
    expected, got = gradient(whole, 1, guided=True), gradient(policy, 1, guided=True)
    assert world.lockstep is not None
    # Process 0 has three backward passes to make and a plain forward, process 1 has one.
    for _ in range(2 if world.rank == 0 else 0):
        gradient(policy, 2, guided=False)
    if world.rank == 0:
        with torch.no_grad():
            velocity(policy, 2, guided=False)
    world.rest()
    left = [n for n, p in policy.parameters().items() if p.grad is not None]
    result = {
        "dtensors": sum(isinstance(p, DTensor) for p in frozen),
        "frozen": len(frozen),
        "local_share": local / sum(p.numel() for p in frozen),
        "accompanied": world.lockstep.accompanied,
        "gradients_left": left,
        "error": norm(expected, got) / norm(expected),
        "hash": weights_hash(state(policy, world)),
        "hash_error": "",
    }
    with torch.no_grad():
        next(iter(policy.parameters().values()))[0, 0] += float(world.rank)
    try:
        weights_hash(state(policy, world))
    except FlashGRPOError as exc:
        result["hash_error"] = str(exc)
    world.lockstep = None
    return result


def state(policy: WanPolicy, world: World) -> Any:
    return SimpleNamespace(policy=policy, world=world, state=RunState(iteration=7))


def velocity(policy: WanPolicy, seed: int, *, guided: bool) -> torch.Tensor:
    width = policy.transformer.config.text_dim
    return policy.velocity(
        normal((2, 16, 3, 8, 8), seed),
        700.0,
        normal((8, width), 5),
        normal((8, width), 6),
        3.0 if guided else 1.0,
    )


def gradient(policy: WanPolicy, seed: int, *, guided: bool) -> dict[str, torch.Tensor]:
    velocity(policy, seed, guided=guided).square().sum().backward()
    found = {}
    for name, parameter in policy.parameters().items():
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad.double(), None
    return found


def norm(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor] | None = None) -> float:
    parts = [v - b[k] if b else v for k, v in a.items()]
    return float(torch.cat([p.flatten() for p in parts]).norm())


def stall(world: World) -> list[str]:
    """Process 1 hangs in a reward while process 0 waits for it."""
    told: list[str] = []
    with Watchdog(Control(), world, limit=0.6, period=0.1) as watchdog:
        watchdog.warn = lambda iteration, code, text: told.append(f"{code} {iteration}: {text}")
        watchdog.phase("score", 1, 3)
        world.barrier()
        if world.rank == 1:
            time.sleep(2.0)
        world.barrier()
    return told


if __name__ == "__main__":
    main(Path(sys.argv[1]))
