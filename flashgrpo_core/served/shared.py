"""`once_per_node`: a heavy reward is loaded by one process of each machine and serves the others."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from typing import Any

from ..config import Config
from ..distributed import World
from ..rewards.mix import RewardMix
from ..rewards.terms import TERM_KEYS
from .server import ServerSettings, start

_KEY = "once_per_node"


def share(config: Config, world: World) -> Config:
    """A configuration for this process only, whose heavy terms ask the first process of the machine.

    That process loads them and answers on loopback, its own questions too, so that every rank's
    scores come from one place. All processes must call this together.

    Raises:
        FlashGRPOError: a reward cannot be made.
    """
    config = copy.deepcopy(config)
    if config.reward.on_nan == "auto":
        remote = {"served", "judge"} & {term.get("name") for term in config.reward.terms}
        config.reward.on_nan = "mask" if remote else "error"
    tables = [t for t in (*config.reward.terms, *config.eval.terms) if t.get(_KEY)]
    wanted = sorted({json.dumps(_own(table), sort_keys=True) for table in tables})
    ports = [0.0] * len(wanted)
    if world.local_rank == 0:
        made = [json.loads(text) for text in wanted]
        rewards = [{t["name"]: RewardMix([t], on_nan="mask")} for t in made]
        ports = [float(port) for port in _serve(rewards)]
    # Ranks of one machine follow each other.
    found = world.gather(ports)[world.rank - world.local_rank]
    for table in tables:
        own = _own(table)
        port = int(found[wanted.index(json.dumps(own, sort_keys=True))])
        kept = {key: table[key] for key in TERM_KEYS if key in table and key != _KEY}
        table.clear()
        table.update(kept)
        table |= {"name": "served", "reward": own["name"], "label": own["name"]}
        table["url"] = f"http://127.0.0.1:{port}"
    return config


def _own(table: dict[str, Any]) -> dict[str, Any]:
    """The reward of a term: its name and options, without what the mix does with it."""
    shaping = set(TERM_KEYS) - {"name"}
    return {key: value for key, value in table.items() if key not in shaping}


def _serve(rewards: list[dict[str, RewardMix]]) -> list[int]:
    """Start a server for each reward in a thread that lives as long as the process; their ports."""
    ports: list[int] = []
    listening = threading.Event()
    failures: list[BaseException] = []

    async def run() -> None:
        runners = []
        try:
            for one in rewards:
                runner, port = await start(one, ServerSettings(queue=256))
                runners.append(runner)
                ports.append(port)
        except BaseException as exc:
            failures.append(exc)
            return
        finally:
            listening.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(run()), name="shared-rewards", daemon=True).start()
    listening.wait()
    if failures:
        raise failures[0]
    return ports
