"""A server whose process can be looked into, for the tests of the nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import ComfyServer

PROBE = Path(__file__).with_name("probe_node.py")


@pytest.fixture(scope="session")
def probe_server(make_server: Callable[..., ComfyServer]) -> ComfyServer:
    """ComfyUI with the pack, the tiny files and the probe nodes, shared by the session."""
    return make_server(nodes=(PROBE,))
