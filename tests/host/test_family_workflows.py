"""Workflows 05 to 08 in the real server: all are accepted, those with two experts and a start
image run from training to a video; `tests/soak/family_workflows.py` runs every pair.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from family_workflows import (
    WORKFLOWS,
    of_type,
    place_models,
    rendering_prompt,
    train_and_render,
    training_prompt,
    wanted_files,
    workflow,
)
from fetch import comfy_tree
from harness import ComfyServer

from flashgrpo_core.files import open_tensors
from flashgrpo_core.presets import PRESETS

RUN = {
    "06_wan22_a14b_train": ("high_noise", "low_noise"),
    "08_wan21_i2v_train": ("",),
}


@pytest.fixture(scope="module")
def server(
    probe_server: ComfyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyServer]:
    """The server with small files under the names of the two that run, and what it needs besides."""
    shutil.copyfile(comfy_tree() / "input" / "example.png", probe_server.input / "example.png")
    made: list[Path] = []
    for name in RUN:
        place_models(probe_server, name, tmp_path_factory.mktemp("models"), whole=False)
        made += [probe_server.models / kind / file for file, kind in wanted_files(name).items()]
    yield probe_server
    for path in made:
        path.unlink(missing_ok=True)


def test_every_workflow_is_accepted(server: ComfyServer) -> None:
    """Validation looks at types, ranges and lists; the first prompt keeps the others waiting."""
    empty = []
    for name, (use, _, _) in WORKFLOWS.items():
        loras = [n["widgets_values"][0] for n in workflow(use)["nodes"] if "Lora" in n["type"]]
        names = {**wanted_files(name), **{lora: "loras" for lora in loras}}
        paths = [server.models / kind / file for file, kind in names.items()]
        for path in paths:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                empty.append(path)
    first = server.submit(training_prompt(server, "06_wan22_a14b_train", iterations=100))
    server.wait_running(first)
    for name in WORKFLOWS:
        server.submit(training_prompt(server, name))
        server.submit(rendering_prompt(server, name, whole=True))
    server.post("/queue", {"clear": True})
    server.interrupt()
    assert server.wait(first).interrupted
    shutil.rmtree(server.output / "flashgrpo" / "runs" / "wan22_a14b")
    for path in empty:
        path.unlink()


@pytest.mark.parametrize("name", list(RUN))
def test_from_training_to_a_video_with_the_lora(server: ComfyServer, name: str) -> None:
    """Every key of the LoRA finds its module in the stock loader, and the video changes."""
    found = train_and_render(server, name, iterations=1, whole=False)
    assert found["not_loaded"] == []
    assert found["frames"] == [5, 32, 32, 3]
    assert found["difference"] > 0.5
    for lora, expert in zip(found["loras"], RUN[name], strict=True):
        header = open_tensors(server.output / "loras" / lora).metadata
        assert header.get("flashgrpo.expert", "") == expert
    (policy,) = of_type(training_prompt(server, name), "FlashGRPOLoadPolicy")
    assert (policy["storage"], policy["blocks_to_swap"]) == ("preset", -1)
    config = server.output / "flashgrpo" / "runs" / policy["run_name"] / "config.toml"
    model = tomllib.loads(config.read_text(encoding="utf-8"))["model"]
    (video,) = of_type(training_prompt(server, name), "FlashGRPOVideoSettings")
    preset = PRESETS[video["preset"]].tables["model"]
    assert model["storage"] == preset["storage"] == "fp8"
    assert model["blocks_to_swap"] == preset["blocks_to_swap"] > 0
