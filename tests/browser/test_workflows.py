"""The shared workflows in the real frontends, in both renderers, with Run pressed in the browser.

The ordinary run takes one renderer of each frontend; `pytest -m "matrix or not matrix"
tests/browser` takes all four pairs. Screenshots for people to look at: `.cache/screenshots`.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import PromptResult
from playwright.sync_api import expect
from workflow_view import (
    FRONTENDS,
    RENDERERS,
    SMALL,
    WORKFLOWS,
    OpenView,
    WorkflowView,
    assert_no_errors,
)

NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
MATRIX = pytest.mark.matrix


def pairs(*ordinary: tuple[str, str]) -> pytest.MarkDecorator:
    """All pairs of frontend and renderer; those not named are left to the matrix."""
    rows = [
        pytest.param(frontend, renderer, marks=() if (frontend, renderer) in ordinary else MATRIX)
        for frontend in FRONTENDS
        for renderer in RENDERERS
    ]
    return pytest.mark.parametrize(("frontend", "renderer"), rows)


@pairs(("old", "classic"), ("new", "nodes2"))
def test_every_workflow_opens(open_view: OpenView, frontend: str, renderer: str) -> None:
    """Known nodes only, values where they belong, everything on the screen, nothing covered."""
    view = open_view(frontend, renderer)
    for name in NAMES:
        document = view.open(name)
        assert view.tab.missing_types() == [], name
        view.tab.page.keyboard.press("Escape")  # the missing-models dialog
        saved = view.tab.page.evaluate("window.app.graph.serialize()")
        assert widgets(saved) == widgets(document), name
        assert links(saved) == links(document), name
        view.check_tidy(f"{frontend}_{renderer}_{name}_opened")
    assert_no_errors(view.tab)


def widgets(document: dict[str, Any]) -> dict[str, Any]:
    """Values by node; the frontends leave out none and add none."""
    return {str(node["id"]): node.get("widgets_values", []) for node in document["nodes"]}


def links(document: dict[str, Any]) -> list[list[str]]:
    """Links as (source, target node, type); the frontend may number its slots anew."""
    return sorted([str(x[1]), str(x[2]), str(x[3]), str(x[5])] for x in document["links"])


@pytest.mark.parametrize(
    ("frontend", "name"),
    [
        ("old", "03_wan21_1.3b_train"),
        ("new", "04_use_lora"),
        pytest.param("old", "04_use_lora", marks=MATRIX),
        pytest.param("new", "03_wan21_1.3b_train", marks=MATRIX),
    ],
)
def test_missing_models_are_named(open_view: OpenView, frontend: str, name: str) -> None:
    """The frontend's own dialog says which file goes into which folder."""
    view = open_view(frontend, "classic")
    document = view.open(name)
    page = view.tab.page
    if frontend == "new":
        page.get_by_role("button", name="View details").first.click()
    expect(page.get_by_text("Missing Models").first).to_be_visible()
    wanted = [m for node in document["nodes"] for m in node["properties"].get("models", [])]
    assert len(wanted) == 3
    for model in wanted:
        expect(page.get_by_text(model["name"]).first).to_be_visible()
        expect(page.get_by_text(model["directory"]).first).to_be_visible()
    view.screenshot(f"{frontend}_classic_{name}_missing")
    assert_no_errors(view.tab)


@pairs(("new", "nodes2"))
def test_tiny_demo_from_run_to_lora(open_view: OpenView, frontend: str, renderer: str) -> None:
    """01 is run, the page reloaded meanwhile; then 04b renders with the LoRA it made."""
    view = open_view(frontend, renderer)
    run = f"demo_{frontend}_{renderer}"
    prepare_demo(view, run)
    prompt_id = view.tab.press_run()
    before = view.wait_monitor("a point", lambda s: s["points"] >= 1)
    assert before["status"] == "training"
    view.screenshot(f"{frontend}_{renderer}_01_tiny_demo_running")
    assert before["drawn"] >= 1 and before["finish"], before

    view.tab.open()
    prepare_demo(view, run)
    after = view.wait_monitor("the curve again", lambda s: s["points"] >= 1, seconds=60)
    assert after["drawn"] >= 1 and after["points"] >= before["points"], after

    assert view.tab.server.wait(prompt_id, timeout=900).status == "success"
    done = view.wait_monitor("the end", lambda s: s["status"] == "finished", seconds=60)
    assert done["points"] == 3 and not done["finish"] and done["inside"], done
    view.wait_monitor("the newest video", lambda s: s["film"] > 0, seconds=60)

    # As a person does: press R to refresh the lists, then open the next file.
    view.tab.page.evaluate("window.app.refreshComboInNodes()")
    view.open("04b_use_lora_tiny")
    videos = saved_files(view.tab.run())
    assert len(videos) == 1 and videos[0].endswith(".mp4")
    check_after_run(view, f"{frontend}_{renderer}_04b_use_lora_tiny_finished")
    assert_no_errors(view.tab, reloaded=True)


def prepare_demo(view: WorkflowView, run: str) -> None:
    """01 with the smallest training."""
    view.open("01_tiny_demo")
    view.set("FlashGRPOLoadPolicy", run_name=run)
    view.set("FlashGRPOTrain", iterations=3, evaluate_every=1)
    view.set("FlashGRPOTrainAdvanced", **SMALL)


@pairs(("old", "classic"))
def test_step_by_step_runs_twice(open_view: OpenView, frontend: str, renderer: str) -> None:
    """02: the second queue is the second iteration, and every picture is there."""
    view = open_view(frontend, renderer)
    view.open("02_step_by_step")
    run = f"steps_{frontend}_{renderer}"
    view.set("FlashGRPOGroups", group_size=4, prompts_per_iteration=2)
    view.set("FlashGRPOLoadPolicy", run_name=run)
    first = saved_files(view.tab.run(timeout=600))
    second = saved_files(view.tab.run(timeout=600))
    assert len(set(first)) == len(set(second)) == 4 and not set(first) & set(second)
    summary = view.tab.server.get(f"/flashgrpo/runs/{run}")
    assert summary["iteration"] == 2, summary
    check_after_run(view, f"{frontend}_{renderer}_02_step_by_step_finished")
    assert_no_errors(view.tab)


@pytest.mark.matrix
@pairs()
def test_finished_demo_stays_tidy(open_view: OpenView, frontend: str, renderer: str) -> None:
    """After running without a reload, curve and video are there and nothing covers anything."""
    view = open_view(frontend, renderer)
    prepare_demo(view, f"tidy_{frontend}_{renderer}")
    saved_files(view.tab.run(timeout=900))
    check_after_run(view, f"{frontend}_{renderer}_01_tiny_demo_finished")
    assert_no_errors(view.tab)


def saved_files(result: PromptResult) -> list[str]:
    """Names of the pictures and videos that a successful prompt shows."""
    assert result.status == "success", result.error
    return [x["filename"] for out in result.outputs.values() for x in out.get("images", [])]


def check_after_run(view: WorkflowView, name: str) -> None:
    view.settle()
    text = view.tab.page.evaluate("document.body.innerText")
    assert "failed to load" not in text and "Error loading" not in text
    view.check_tidy(name)
