"""The published archive, unpacked as a user's installer does it, trains in the real ComfyUI."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator

import pytest
from api_prompt import api_prompt
from archive import build_archive
from harness import BASE_NAME, PACK_FOLDER, ComfyServer


@pytest.fixture(scope="module")
def archive_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """ComfyUI with nothing of ours but the unzipped archive: no models, no installed package."""
    folder = tmp_path_factory.mktemp("archive")
    pack = folder / BASE_NAME / "custom_nodes" / PACK_FOLDER
    with zipfile.ZipFile(build_archive(folder / "node.zip")) as packed:
        packed.extractall(pack)
    server = ComfyServer(folder).start()
    yield server
    server.stop()


def test_the_tiny_demo_runs_from_the_archive(archive_server: ComfyServer) -> None:
    server = archive_server
    pack = server.custom_nodes / PACK_FOLDER
    assert f"(IMPORT FAILED): {pack}" not in server.log(), server.log()[-4000:]
    workflow = json.loads((pack / "workflows" / "01_tiny_demo.json").read_text(encoding="utf-8"))
    prompt = api_prompt(workflow, server.object_info())
    ids = {node["class_type"]: number for number, node in prompt.items()}
    prompt[ids["FlashGRPOTrain"]]["inputs"] |= {"iterations": 3, "evaluate_every": 3}
    prompt[ids["FlashGRPOTrainAdvanced"]]["inputs"] |= {
        "group_size": 4,
        "prompts_per_iteration": 2,
        "validation_prompts": 1,
        "validation_seeds": 1,
        "test_prompts": 1,
        "test_seeds": 1,
    }
    result = server.queue(prompt)
    (video,) = result.outputs[ids["FlashGRPOCompare"]]["images"]
    folder = {"output": server.output, "temp": server.temp}[video["type"]] / video["subfolder"]
    assert (folder / video["filename"]).stat().st_size > 1000
    run = server.get("/flashgrpo/runs/tiny_demo")
    assert (run["status"], run["iteration"]) == ("finished", 3)
    name = prompt[ids["FlashGRPOSaveLora"]]["inputs"]["name"]
    loader = server.object_info("LoraLoaderModelOnly")["input"]["required"]["lora_name"]
    assert f"{name}.safetensors" in loader[0]


def test_templates_and_help_come_with_the_archive(archive_server: ComfyServer) -> None:
    """What the frontend asks the server for: workflows, their pictures and the help pages."""
    names = archive_server.get("/workflow_templates")[PACK_FOLDER]
    assert len(names) == 13
    for name in names:
        for suffix in (".json", ".jpg"):
            path = f"/api/workflow_templates/{PACK_FOLDER}/{name}{suffix}"
            status, body = archive_server.request("GET", path)
            assert status == 200 and len(body) > 1000, path
    for node in archive_server.object_info():
        if node.startswith("FlashGRPO"):
            path = f"/extensions/{PACK_FOLDER}/docs/{node}.md"
            status, body = archive_server.request("GET", path)
            assert status == 200 and len(body) > 100, path
