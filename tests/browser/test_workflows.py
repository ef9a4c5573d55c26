"""The shared workflows in the real frontends, in both renderers, with Run pressed in the browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from frontend import Frontend
from harness import ComfyServer
from playwright.sync_api import expect
from workflow_view import WORKFLOWS, WorkflowView

pytestmark = pytest.mark.matrix

NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
#: The smallest training that is one.
SMALL = {
    "group_size": 4,
    "prompts_per_iteration": 2,
    "validation_prompts": 2,
    "validation_seeds": 1,
    "test_prompts": 2,
    "test_seeds": 1,
}
RENDERERS = ("classic", "nodes2")

OpenView = Callable[[ComfyServer, str], WorkflowView]


@pytest.fixture
def open_view(open_frontend: Callable[..., Frontend]) -> OpenView:
    """Open a tab in one of the two renderers."""

    def view(server: ComfyServer, renderer: str) -> WorkflowView:
        vue = renderer == "nodes2"
        return WorkflowView(open_frontend(server, {"Comfy.VueNodes.Enabled": vue}), vue)

    return view


def frontend_name(server: ComfyServer) -> str:
    """Which of the two servers this is, for file and run names."""
    return "new" if server._frontend_root else "old"


def assert_no_errors(tab: Frontend) -> None:
    assert tab.page_errors == []
    # The frontend itself looks packs and models up on its maker's servers, which is refused here.
    ours = [text for text in tab.console_errors if "flashgrpo.js" in text]
    assert ours == []


@pytest.mark.parametrize("renderer", RENDERERS)
def test_every_workflow_opens(
    frontend_server: ComfyServer, open_view: OpenView, renderer: str
) -> None:
    """Known nodes only, values where they belong, everything on the screen, nothing covered."""
    view = open_view(frontend_server, renderer)
    for name in NAMES:
        document = view.open(name)
        assert view.tab.missing_types() == [], name
        view.tab.page.keyboard.press("Escape")  # the missing-models dialog
        saved = view.tab.page.evaluate("window.app.graph.serialize()")
        assert widgets(saved) == widgets(document), name
        assert links(saved) == links(document), name
        view.screenshot(f"{frontend_name(frontend_server)}_{renderer}_{name}_opened")
        assert view.overlaps() == [], name
        assert view.outside() == [], name
    assert_no_errors(view.tab)


def widgets(document: dict[str, Any]) -> dict[str, Any]:
    """Values by node; the frontends leave out none and add none."""
    return {str(node["id"]): node.get("widgets_values", []) for node in document["nodes"]}


def links(document: dict[str, Any]) -> list[list[str]]:
    """Links as (source, target node, type); the frontend may number its slots anew."""
    return sorted([str(x[1]), str(x[2]), str(x[3]), str(x[5])] for x in document["links"])


@pytest.mark.parametrize("name", ["03_wan21_1.3b_train", "04_use_lora"])
def test_missing_models_are_named(
    frontend_server: ComfyServer, open_view: OpenView, name: str
) -> None:
    """The frontend's own dialog says which file goes into which folder."""
    view = open_view(frontend_server, "classic")
    document = view.open(name)
    page = view.tab.page
    if frontend_name(frontend_server) == "new":
        page.get_by_role("button", name="View details").first.click()
    expect(page.get_by_text("Missing Models").first).to_be_visible()
    wanted = [m for node in document["nodes"] for m in node["properties"].get("models", [])]
    assert len(wanted) == 3
    for model in wanted:
        expect(page.get_by_text(model["name"]).first).to_be_visible()
        expect(page.get_by_text(model["directory"]).first).to_be_visible()
    view.screenshot(f"{frontend_name(frontend_server)}_classic_{name}_missing")
    assert_no_errors(view.tab)


def test_tiny_demo_from_run_to_lora(frontend_server: ComfyServer, open_view: OpenView) -> None:
    """01 is run, the page reloaded meanwhile; then 04b renders with the LoRA it made."""
    server, name = frontend_server, frontend_name(frontend_server)
    view = open_view(server, "nodes2" if name == "new" else "classic")
    run = f"browser_{name}"
    prepare_demo(view, run)
    prompt_id = view.tab.press_run()
    before = view.wait_monitor("a point", lambda s: s["points"] >= 1)
    assert before["status"] == "training"
    view.screenshot(f"{name}_01_running")
    assert before["drawn"] >= 1 and before["finish"], before

    view.tab.open()
    prepare_demo(view, run)
    after = view.wait_monitor("the curve again", lambda s: s["points"] >= 1, seconds=60)
    assert after["drawn"] >= 1 and after["points"] >= before["points"], after

    assert server.wait(prompt_id, timeout=900).status == "success"
    done = view.wait_monitor("the end", lambda s: s["status"] == "finished", seconds=60)
    assert done["points"] == 3 and not done["finish"] and done["inside"], done
    view.wait_monitor("the newest video", lambda s: s["film"] > 0, seconds=60)
    assert_no_errors(view.tab)

    # As a person does: press R to refresh the lists, then open the next file.
    view.tab.page.evaluate("window.app.refreshComboInNodes()")
    view.open("04b_use_lora_tiny")
    result = view.tab.run()
    assert result.status == "success"
    videos = [item for out in result.outputs.values() for item in out.get("images", [])]
    assert [v["filename"].endswith(".mp4") for v in videos] == [True]
    assert_no_errors(view.tab)


def prepare_demo(view: WorkflowView, run: str) -> None:
    """01 with the smallest training."""
    view.open("01_tiny_demo")
    view.set("FlashGRPOLoadPolicy", run_name=run)
    view.set("FlashGRPOTrain", iterations=3, evaluate_every=1)
    view.set_advanced(**SMALL)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_finished_workflows_stay_tidy(
    frontend_server: ComfyServer, open_view: OpenView, renderer: str
) -> None:
    """After running, pictures and videos are there and nothing covers anything."""
    server, name = frontend_server, frontend_name(frontend_server)
    view = open_view(server, renderer)
    prepare_demo(view, f"browser_{name}")
    assert view.tab.run(timeout=900).status == "success"
    check_after_run(view, f"{name}_{renderer}_01_tiny_demo_finished")

    view.open("02_step_by_step")
    view.set("FlashGRPOGroups", group_size=4, prompts_per_iteration=2)
    view.set("FlashGRPOLoadPolicy", run_name=f"steps_{name}")
    first = view.tab.run(timeout=600)
    second = view.tab.run(timeout=600)
    assert (first.status, second.status) == ("success", "success")
    pictures = {out["images"][0]["filename"] for out in second.outputs.values() if "images" in out}
    assert len(pictures) == 4
    check_after_run(view, f"{name}_{renderer}_02_step_by_step_finished")

    view.open("04b_use_lora_tiny")
    assert view.tab.run().status == "success"
    check_after_run(view, f"{name}_{renderer}_04b_use_lora_tiny_finished")
    assert_no_errors(view.tab)


def check_after_run(view: WorkflowView, name: str) -> None:
    view.settle()
    view.screenshot(name)
    text = view.tab.page.evaluate("document.body.innerText")
    assert "failed to load" not in text and "Error loading" not in text
    assert view.overlaps() == [], name
    assert view.outside() == [], name


def test_finish_now(frontend_server: ComfyServer, open_view: OpenView) -> None:
    """The button ends a long run early, and the prompt still returns its LoRA."""
    server, name = frontend_server, frontend_name(frontend_server)
    view = open_view(server, "nodes2" if name == "new" else "classic")
    view.open("01_tiny_demo")
    view.set("FlashGRPOLoadPolicy", run_name=f"early_{name}")
    view.set("FlashGRPOTrain", iterations=500, evaluate_every=0)
    view.set_advanced(**SMALL)
    prompt_id = view.tab.press_run()
    view.wait_monitor("a point", lambda s: s["points"] >= 1)
    view.tab.page.get_by_role("button", name="Finish now").click()
    result = server.wait(prompt_id, timeout=300)
    assert result.status == "success"
    summary = server.get(f"/flashgrpo/runs/early_{name}")
    assert summary["status"] == "finished" and 1 <= summary["iteration"] < 500
    assert_no_errors(view.tab)


def test_the_interface_speaks_korean_and_chinese(
    new_frontend_server: ComfyServer, open_frontend: Callable[..., Frontend]
) -> None:
    """In 1.58.1; the old frontend takes a pack's own texts for node names only in English."""
    texts = new_frontend_server.get("/i18n")
    for language in ("ko", "zh"):
        tab = open_frontend(new_frontend_server, {"Comfy.Locale": language})
        view = WorkflowView(tab, vue=False)
        view.open("01_tiny_demo")
        view.set("FlashGRPOLoadPolicy", run_name="not_there_yet")
        wanted = texts[language]["flashgrpo"]["waiting"]
        view.wait_monitor(language, lambda s, t=wanted: t in s["text"], seconds=60)
        shown = tab.page.evaluate(
            "(() => { const n = window.app.graph._nodes.find(n => n.type === 'FlashGRPOSaveLora');"
            " return [n.title, n.widgets[0].label]; })()"
        )
        names = texts[language]["nodeDefs"]["FlashGRPOSaveLora"]
        assert shown == [names["display_name"], names["inputs"]["name"]["name"]]
        assert_no_errors(tab)
        tab.close()


def test_hostile_texts_stay_texts(comfy_server: ComfyServer, open_view: OpenView) -> None:
    """Whatever a run calls itself, the monitor shows it as text."""
    view = open_view(comfy_server, "classic")
    evil = "<img src=x onerror=window.broken=1>"
    answer = {
        "name": evil,
        "status": evil,
        "training": False,
        "iteration": 1,
        "iterations": 2,
        "rewards": [[1, 0.5], [2, "x"], None, [3, 1e999]],
        "validation": [[0, 0.5, 0, -0.1, 0.1], ["a"]],
        "warnings": [evil],
        "filmstrip": "javascript:window.broken=1",
        "phase": None,
        "eta": None,
    }
    body = json.dumps(answer).replace("Infinity", "1e999")
    page = view.tab.page
    page.route(
        "**/flashgrpo/runs", lambda route: route.fulfill(body=json.dumps([{"name": "evil"}]))
    )
    page.route("**/flashgrpo/runs/evil", lambda route: route.fulfill(body=body))
    view.open("01_tiny_demo")
    view.set("FlashGRPOLoadPolicy", run_name="evil")
    state = view.wait_monitor("the run", lambda s: evil in s["text"], seconds=60)
    assert state["film"] == 0 and state["drawn"] >= 1
    assert page.evaluate("window.broken") is None
    assert page.locator(".flashgrpo-monitor img").count() == 1
    assert_no_errors(view.tab)
