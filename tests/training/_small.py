"""The smallest training of the embedded tiny Wan, and a host that watches and stops it."""

from __future__ import annotations

from typing import Any

import torch

from flashgrpo_core.control import Control
from flashgrpo_core.errors import Cancelled

#: Two groups of two videos: the smallest update there is, about a second of decoding.
SMALL: dict[str, dict[str, Any]] = {
    "model": {"transformer": "tiny"},
    "rollout": {"group_size": 2, "prompts_per_iteration": 2, "micro_batch": 2, "decode_batch": 4},
    "eval": {"every": 2, "prompts": 2, "seeds": 1, "test_prompts": 2, "test_seeds": 1},
    "optim": {"learning_rate": 1e-3, "warmup": 0},
    "run": {"iterations": 4, "seed": 3, "threads": 1},
}


class Recorder(Control):
    """Keeps all events; cancels at a chosen phase of a chosen iteration."""

    def __init__(self, stop_at: tuple[str, int] | None = None, after_checks: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.stop_at = stop_at
        self.after_checks = after_checks
        self.current = ("", 0)
        self.brought: list[torch.nn.Module] = []

    def phase(self, name: str, total: int, iteration: int = 0) -> None:
        self.current = (name, iteration)

    def check(self) -> None:
        if self.stop_at == self.current:
            if self.after_checks == 0:
                self.stop_at = None
                raise Cancelled("stopped by the test")
            self.after_checks -= 1

    def bring(self, network: torch.nn.Module) -> None:
        self.brought.append(network)

    def event(self, record: dict[str, Any]) -> None:
        self.events.append(record)
