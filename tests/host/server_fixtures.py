"""Fixtures around the real ComfyUI 0.3.75 on the CPU, for `tests/host` and `tests/browser`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from archive import REPO, install_pack
from harness import BASE_NAME, PACK_FOLDER, ComfyServer
from wan_files import FILE_SETS, copy_models, embedded_files, random_files


@pytest.hookimpl
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Treat the repository as a plain folder.

    Its `__init__.py` is the entry point of the node pack: as a package, pytest would import it.
    """
    return pytest.Dir.from_parent(parent, path=path) if path == REPO else None


@pytest.fixture(scope="session")
def tiny_files() -> dict[str, Path]:
    """The embedded tiny Wan files under `transformer`, `vae` and `text_encoder`."""
    return embedded_files()


@pytest.fixture(scope="session")
def random_wan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wan files with random weights, built by ComfyUI's own classes: `transformer` and `vae`."""
    return random_files(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session", params=FILE_SETS)
def wan_files(request: pytest.FixtureRequest) -> dict[str, Path]:
    """Runs a test twice: with random weights, and with the embedded tiny Wan."""
    return request.getfixturevalue({"random": "random_wan", "tiny": "tiny_files"}[request.param])


@pytest.fixture(scope="session")
def make_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_files: dict[str, Path]
) -> Iterator[Callable[..., ComfyServer]]:
    """Make further servers: `make_server(pack=True, frontend_root=..., arguments=(...))`;
    `nodes` are further single-file custom nodes; `network` adds what the archive leaves out.

    Each has its own folders with the tiny files in them, is started, and ends with the session at
    the latest. Prefer `comfy_server`: a start takes ten seconds.
    """
    servers: list[ComfyServer] = []

    def make(
        *,
        pack: bool = True,
        network: bool = False,
        nodes: tuple[Path, ...] = (),
        **options: Any,
    ) -> ComfyServer:
        folder = tmp_path_factory.mktemp("comfy")
        custom_nodes = folder / BASE_NAME / "custom_nodes"
        custom_nodes.mkdir(parents=True)
        if pack:
            installed = install_pack(custom_nodes / PACK_FOLDER)
            if network:
                # As from git clone: the registry's archive leaves the network code out.
                served = Path("flashgrpo_core", "served")
                shutil.copytree(REPO / served, installed / served)
        for node in nodes:
            shutil.copyfile(node, custom_nodes / node.name)
        server = ComfyServer(folder, **options)
        copy_models(tiny_files, server.models)
        servers.append(server)
        return server.start()

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def comfy_server(make_server: Callable[..., ComfyServer]) -> ComfyServer:
    """One running ComfyUI with the pack and the tiny files, shared by the whole session."""
    return make_server()


@pytest.fixture(scope="session")
def pack_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack as it is installed, under a path with a space and a non-ASCII letter."""
    folder = tmp_path_factory.mktemp("pack") / BASE_NAME / "custom_nodes" / PACK_FOLDER
    return install_pack(folder)
