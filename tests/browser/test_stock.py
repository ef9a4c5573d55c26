"""The browser harness works with stock ComfyUI, in the oldest and the newest tested frontend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frontend import Frontend
from harness import ComfyServer, PromptError
from PIL import Image


def workflow(colour: int, kind: str = "EmptyImage") -> dict[str, Any]:
    """A saved workflow in the UI's own format: three stock nodes in a row."""

    def node(number: int, kind: str, widgets: list[Any], **links: Any) -> dict[str, Any]:
        return {
            "id": number,
            "type": kind,
            "pos": [350 * number - 300, 150],
            "size": [300, 160],
            "flags": {},
            "order": number - 1,
            "mode": 0,
            "properties": {"Node name for S&R": kind},
            "widgets_values": widgets,
            **links,
        }

    def put(link: int) -> dict[str, Any]:
        return {"inputs": [{"name": "image", "type": "IMAGE", "link": link}]}

    def out(link: int) -> dict[str, Any]:
        return {"outputs": [{"name": "IMAGE", "type": "IMAGE", "links": [link], "slot_index": 0}]}

    save = node(
        3, "SaveImage", ["browser"], inputs=[{"name": "images", "type": "IMAGE", "link": 2}]
    )
    return {
        "last_node_id": 3,
        "last_link_id": 2,
        "nodes": [
            node(1, kind, [96, 64, 1, colour], **out(1)),
            node(2, "ImageInvert", [], **put(1), **out(2)),
            save,
        ],
        "links": [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"]],
        "groups": [],
        "config": {},
        "extra": {"ds": {"scale": 1, "offset": [0, 0]}},
        "version": 0.4,
    }


def test_a_dropped_workflow_runs(
    frontend_server: ComfyServer, open_frontend: Callable[..., Frontend], tmp_path: Path
) -> None:
    tab = open_frontend(frontend_server)
    path = tmp_path / "stock.json"
    path.write_text(json.dumps(workflow(0xFF0000)), encoding="utf-8")
    tab.load_workflow(path)
    assert tab.missing_types() == []
    result = tab.run()
    assert result.status == "success"
    saved = frontend_server.output / result.outputs["3"]["images"][0]["filename"]
    with Image.open(saved) as image:
        assert image.size == (96, 64)
        assert image.convert("RGB").getpixel((5, 5)) == (0x00, 0xFF, 0xFF)
    with Image.open(tab.screenshot(tmp_path / "after.png")) as shown:
        assert shown.size == (1920, 1080)
        assert len(shown.convert("RGB").getcolors(1 << 24)) > 100, "the page is blank"
    assert tab.page_errors == []
    assert tab.foreign_requests == []


def test_mistakes_are_noticed(
    comfy_server: ComfyServer, open_frontend: Callable[..., Frontend]
) -> None:
    tab = open_frontend(comfy_server)
    tab.load_workflow(workflow(0x0000FF, kind="NoSuchNode"))
    assert tab.missing_types() == ["NoSuchNode"]
    assert "NoSuchNode" in tab.dialog_text()
    tab.close_dialogs()
    broken = workflow(0x0000FF)
    broken["links"] = broken["links"][1:]
    broken["nodes"][1]["inputs"][0]["link"] = None
    tab.load_workflow(broken)
    assert tab.missing_types() == []
    with pytest.raises(PromptError):
        tab.press_run()


def test_settings_last_as_long_as_the_tab(
    comfy_server: ComfyServer, open_frontend: Callable[..., Frontend]
) -> None:
    tab = open_frontend(comfy_server, settings={"Comfy.Locale": "ko"})
    read = "window.app.extensionManager.setting.get('Comfy.Locale')"
    assert tab.page.evaluate(read) == "ko"
    assert comfy_server.get("/settings")["Comfy.Locale"] == "ko"
    tab.close()
    assert "Comfy.Locale" not in comfy_server.get("/settings")
