"""Make `workflows/*.jpg`: ``python scripts/make_thumbnails.py [name ...]``.

The workflows are opened in the real frontend and, where no download is needed, run to their end;
the picture is what a person sees then. Takes about ten minutes. Not deterministic to the byte.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for place in ("scripts", "tests/host", "tests/browser"):
    sys.path.insert(0, str(ROOT / place))
sys.path.insert(0, str(ROOT))

import workflow_pages  # noqa: E402
from archive import install_pack  # noqa: E402
from fetch import FRONTEND_NEW, comfy_tree, frontend  # noqa: E402
from frontend import Frontend, launch  # noqa: E402
from harness import BASE_NAME, PACK_FOLDER, ComfyServer  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402
from workflow_family import START_IMAGE  # noqa: E402
from workflow_view import WorkflowView  # noqa: E402

RUN = ("01_tiny_demo", "02_step_by_step", "04b_use_lora_tiny")
WIDTH = 960


def main() -> None:
    """Make the pictures of all workflows, or of the named ones."""
    wanted = sys.argv[1:] or sorted(workflow_pages.PAGES)
    folder = Path(tempfile.mkdtemp())
    install_pack(folder / BASE_NAME / "custom_nodes" / PACK_FOLDER)
    server = ComfyServer(folder, frontend_root=frontend(FRONTEND_NEW))
    shutil.copyfile(comfy_tree() / "input" / START_IMAGE, server.input / START_IMAGE)
    for path in (ROOT / "workflows").glob("*.json"):
        if path.stem in RUN:
            continue  # these make or embed their files
        name_files(server, json.loads(path.read_text(encoding="utf-8")))
    server.start(timeout=600)
    try:
        with sync_playwright() as playwright:
            browser = launch(playwright)
            tab = Frontend(browser, server, {"Comfy.Minimap.Visible": False})
            view = WorkflowView(tab, vue=False)
            for name in wanted:
                picture(view, name, folder / f"{name}.png")
            browser.close()
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def name_files(server: ComfyServer, workflow: dict[str, Any]) -> None:
    """Empty files under the names that a workflow asks for: it is opened, and nothing is missing."""
    for node in workflow["nodes"]:
        for model in node["properties"].get("models", []):
            (server.models / model["directory"] / model["name"]).touch()
        if node["type"] == "LoraLoaderModelOnly":
            lora = server.models / "loras" / node["widgets_values"][0]
            lora.parent.mkdir(exist_ok=True)
            lora.touch()


def picture(view: WorkflowView, name: str, shot: Path) -> None:
    """Open one workflow, run it, and keep the part of the screen where its nodes are."""
    view.open(name)
    view.tab.page.evaluate("window.app.refreshComboInNodes()")
    if name in RUN:
        result = view.tab.run(timeout=3000)
        assert result.status == "success", result.error
        # Again: the live preview of the first run gives way to the result.
        view.tab.run(timeout=600)
        view.settle()
    view.tab.page.wait_for_timeout(8000)
    view.tab.screenshot(shot)
    boxes = list(view.boxes().values())
    left, top = min(b[0] for b in boxes) - 20, min(b[1] for b in boxes) - 44
    right, bottom = max(b[2] for b in boxes) + 20, max(b[3] for b in boxes) + 20
    with Image.open(shot) as screen:
        part = screen.convert("RGB").crop((int(left), int(top), int(right), int(bottom)))
    part = part.resize((WIDTH, round(part.height * WIDTH / part.width)), Image.Resampling.LANCZOS)
    part.save(ROOT / "workflows" / f"{name}.jpg", quality=86, optimize=True)
    print(f"wrote workflows/{name}.jpg {part.size}")


if __name__ == "__main__":
    main()
