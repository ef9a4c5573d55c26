"""The harness itself, and that the pack loads in the real ComfyUI 0.3.75."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import ComfyServer, PromptError, run_in_comfy


def image_prompt(batch: int = 1, colour: int = 0xFF0000, node: str = "EmptyImage") -> dict:
    """A stock graph that makes a picture."""
    inputs = {"width": 64, "height": 48, "batch_size": batch, "color": colour}
    return {
        "1": {"class_type": node, "inputs": inputs},
        "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "t"}},
    }


def test_the_server_is_comfyui_0_3_75(comfy_server: ComfyServer) -> None:
    system = comfy_server.get("/system_stats")["system"]
    assert system["comfyui_version"] == "0.3.75"


def test_the_pack_is_loaded_from_a_path_with_a_space_and_an_umlaut(
    comfy_server: ComfyServer,
) -> None:
    log = comfy_server.log()
    folder = str(comfy_server.custom_nodes / "flashgrpo")
    assert " " in folder and "ö" in folder
    loaded = [line for line in log.splitlines() if line.rstrip().endswith(f"seconds: {folder}")]
    assert len(loaded) == 1, log[-3000:]
    assert "IMPORT FAILED" not in loaded[0]
    assert "Error while calling comfy_entrypoint" not in log


def test_a_stock_prompt_gives_its_files(comfy_server: ComfyServer) -> None:
    result = comfy_server.queue(image_prompt(batch=2, colour=0x00FF00))
    images = result.outputs["3"]["images"]
    assert len(images) == 2
    assert all((comfy_server.output / image["filename"]).is_file() for image in images)


def test_queueing_again_answers_from_the_cache(comfy_server: ComfyServer) -> None:
    prompt = image_prompt(colour=0x123456)
    assert comfy_server.queue(prompt).cached == set()
    assert comfy_server.queue(prompt).cached == {"1", "2", "3"}


def test_a_refused_prompt_is_an_error(comfy_server: ComfyServer) -> None:
    with pytest.raises(PromptError, match="NoSuchNode"):
        comfy_server.queue(image_prompt(node="NoSuchNode"))


def test_messages_arrive_on_the_websocket(comfy_server: ComfyServer) -> None:
    with comfy_server.listen() as messages:
        prompt_id = comfy_server.submit(image_prompt(colour=0x654321))
        done = messages.wait_for("execution_success")
    assert done["prompt_id"] == prompt_id


def test_no_foreign_folder_on_the_module_path(tmp_path: Path) -> None:
    """An installed package must not put the repository, with its `nodes`, on the path."""
    answer = run_in_comfy(
        """
        import nodes
        import flashgrpo_core
        report(nodes=nodes.__file__, path=sys.path, core=flashgrpo_core.__file__)
        """,
        tmp_path,
    )
    repo = Path(__file__).resolve().parents[2]
    assert Path(answer["nodes"]).name == "nodes.py"
    assert str(repo) not in answer["path"]
    assert Path(answer["core"]) == repo / "flashgrpo_core" / "__init__.py"


def test_every_node_describes_itself(pack_folder: Path, tmp_path: Path) -> None:
    """Every class of the extension gives a valid schema, with ids in the pack's own namespace."""
    answer = run_in_comfy(
        """
        import asyncio

        async def ids():
            extension = await pack.comfy_entrypoint()
            found = []
            for node in await extension.get_node_list():
                node.GET_SCHEMA()
                node.GET_NODE_INFO_V1()
                found.append(node.GET_SCHEMA().node_id)
            return found

        old = hasattr(pack, "NODE_CLASS_MAPPINGS")
        report(ids=asyncio.run(ids()), web=pack.WEB_DIRECTORY, old=old)
        """,
        tmp_path,
        pack=pack_folder,
    )
    assert answer["web"] == "./web"
    assert not answer["old"], "NODE_CLASS_MAPPINGS would hide comfy_entrypoint"
    assert len(answer["ids"]) == len(set(answer["ids"]))
    assert all(node_id.startswith("FlashGRPO") for node_id in answer["ids"])
