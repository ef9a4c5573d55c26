"""Fixtures for tests in the real frontend; the server fixtures are those of `tests/host`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fetch import FRONTEND_NEW, FRONTEND_OLD, comfy_tree, frontend
from frontend import Frontend, launch
from harness import ComfyServer
from playwright.sync_api import Browser, sync_playwright
from workflow_view import OpenView, WorkflowView

EXAMPLE = "example.png"


@pytest.fixture(scope="session")
def new_frontend_server(make_server: Callable[..., ComfyServer]) -> ComfyServer:
    """Like `comfy_server`, with the newest tested frontend in place of ComfyUI's own."""
    return make_server(frontend_root=frontend(FRONTEND_NEW))


@pytest.fixture(scope="session", params=[FRONTEND_OLD, FRONTEND_NEW])
def frontend_server(request: pytest.FixtureRequest) -> ComfyServer:
    """Runs a test twice: with the oldest and with the newest tested frontend."""
    name = "comfy_server" if request.param == FRONTEND_OLD else "new_frontend_server"
    return request.getfixturevalue(name)


# Not for the session: while playwright is active, no test in this process can use asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium with an empty profile."""
    with sync_playwright() as playwright:
        running = launch(playwright)
        yield running
        running.close()


@pytest.fixture
def open_frontend(browser: Browser) -> Iterator[Callable[..., Frontend]]:
    """Open tabs: `open_frontend(server, settings={...})`; they close with the test."""
    tabs: list[Frontend] = []

    def open_tab(server: ComfyServer, settings: dict[str, Any] | None = None) -> Frontend:
        tab = Frontend(browser, server, settings)
        tabs.append(tab)
        return tab

    yield open_tab
    for tab in tabs:
        tab.close()


@pytest.fixture
def open_view(request: pytest.FixtureRequest, open_frontend: Callable[..., Frontend]) -> OpenView:
    """`open_view(frontend, renderer, settings=None)`: a tab in one of the two renderers."""

    def view(frontend: str, renderer: str, settings: dict[str, Any] | None = None) -> WorkflowView:
        server = request.getfixturevalue(
            {"old": "comfy_server", "new": "new_frontend_server"}[frontend]
        )
        # The picture that every ComfyUI comes with; its folder is the test's own here.
        shutil.copyfile(comfy_tree() / "input" / EXAMPLE, server.input / EXAMPLE)
        vue = renderer == "nodes2"
        tab = open_frontend(server, {"Comfy.VueNodes.Enabled": vue, **(settings or {})})
        return WorkflowView(tab, vue)

    return view
