"""Short trainings of the embedded tiny Wan, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgrpo_core.config import Config
from flashgrpo_core.config_io import build_config
from tests.training._small import SMALL


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
