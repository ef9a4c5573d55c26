"""The monitor on the Train node: "Finish now", languages, and answers that mean harm."""

from __future__ import annotations

import json

import pytest
from workflow_view import FRONTENDS, SMALL, OpenView, assert_no_errors

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_finish_now(open_view: OpenView, frontend: str) -> None:
    """The button ends a long run early, and the prompt still returns its LoRA."""
    view = open_view(frontend, "nodes2" if frontend == "new" else "classic")
    server, run = view.tab.server, f"early_{frontend}"
    view.open("01_tiny_demo")
    view.set("FlashGRPOLoadPolicy", run_name=run)
    view.set("FlashGRPOTrain", iterations=500, evaluate_every=0)
    view.set("FlashGRPOTrainAdvanced", **SMALL)
    prompt_id = view.tab.press_run()
    view.wait_monitor("a point", lambda s: s["points"] >= 1)
    view.tab.page.get_by_role("button", name="Finish now").click()
    result = server.wait(prompt_id, timeout=300)
    assert result.status == "success"
    summary = server.get(f"/flashgrpo/runs/{run}")
    assert summary["status"] == "finished" and 1 <= summary["iteration"] < 500
    assert_no_errors(view.tab)


def test_the_interface_speaks_korean_and_chinese(open_view: OpenView) -> None:
    """In 1.58.1; the old frontend takes a pack's own texts for node names only in English."""
    for language in ("ko", "zh"):
        view = open_view("new", "classic", {"Comfy.Locale": language})
        texts = view.tab.server.get("/i18n")[language]
        view.open("01_tiny_demo")
        view.set("FlashGRPOLoadPolicy", run_name="not_there_yet")
        wanted = texts["flashgrpo"]["waiting"]
        view.wait_monitor(language, lambda s, t=wanted: t in s["text"], seconds=60)
        shown = view.tab.page.evaluate(
            "(() => { const n = window.app.graph._nodes.find(n => n.type === 'FlashGRPOSaveLora');"
            " return [n.title, n.widgets[0].label]; })()"
        )
        names = texts["nodeDefs"]["FlashGRPOSaveLora"]
        assert shown == [names["display_name"], names["inputs"]["name"]["name"]]
        assert_no_errors(view.tab)
        view.tab.close()


def test_hostile_texts_stay_texts(open_view: OpenView) -> None:
    """Whatever a run calls itself, the monitor shows it as text."""
    view = open_view("old", "classic")
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
