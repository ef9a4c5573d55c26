"""Short trainings of the embedded tiny Wan, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgrpo_core.config import Config
from flashgrpo_core.config_io import build_config
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


@pytest.fixture
def small_config(tmp_path: Path) -> Callable[..., Config]:
    """Makes the small configuration with overrides per table, in this test's own folder."""

    def make(name: str = "run", **tables: dict[str, Any]) -> Config:
        merged = {table: dict(values) for table, values in SMALL.items()}
        for table, values in tables.items():
            merged.setdefault(table, {}).update(values)
        merged["run"].update(name=name, output=str(tmp_path))
        return build_config(merged)

    return make


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    """`run.threads` is process-wide: put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
