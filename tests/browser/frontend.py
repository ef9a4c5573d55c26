"""Drive the real ComfyUI frontend in headless Chromium as a person would."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness import HOST, ComfyServer, PromptError, PromptResult
from playwright.sync_api import Browser, Page, Playwright

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM_PATHS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "C:/Program Files/Google/Chrome/Application/chrome.exe",
)
SCREEN = {"width": 1920, "height": 1080}
# Generous: on a busy two-core machine the page alone can need half a minute.
TIMEOUT_MS = 120_000

CLOSE_BUTTONS = ".p-dialog-close-button, [aria-label='Close dialog'], [aria-label='Close']"

DROP_FILE = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, { type: "application/json" }));
  const canvas = document.querySelector("#graph-canvas");
  const box = canvas.getBoundingClientRect();
  const place = { clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
  for (const kind of ["dragenter", "dragover", "drop"]) {
    const options = { bubbles: true, cancelable: true, dataTransfer: data, ...place };
    canvas.dispatchEvent(new DragEvent(kind, options));
  }
}"""


def find_chromium() -> str:
    """Return the path of an installed Chromium or Chrome.

    Raises:
        RuntimeError: none was found; the message says how to get one.
    """
    named = (shutil.which(name) for name in CHROMIUM_NAMES)
    for path in (*named, *CHROMIUM_PATHS):
        if path and os.path.exists(path):
            return path
    raise RuntimeError(
        "the browser tests need Chromium: install it (Debian: apt-get install chromium) so that "
        f"one of {', '.join(CHROMIUM_NAMES)} is on the PATH"
    )


def launch(playwright: Playwright) -> Browser:
    """Start headless Chromium with a new, empty profile."""
    return playwright.chromium.launch(
        executable_path=find_chromium(), headless=True, args=CHROMIUM_FLAGS, timeout=TIMEOUT_MS
    )


class Frontend:
    """One browser tab with the frontend of `server`.

    Attributes:
        page: the playwright page, for everything that has no method here.
        page_errors: uncaught exceptions of any script in the page.
        console_errors: text of every console message of level error.
        foreign_requests: addresses outside this machine that the page asked for; all are refused.

    Args:
        browser: from `launch`.
        server: a running ComfyUI.
        settings: frontend settings, e.g. `{"Comfy.VueNodes.Enabled": True, "Comfy.Locale": "ko"}`.
    """

    def __init__(
        self, browser: Browser, server: ComfyServer, settings: dict[str, Any] | None = None
    ) -> None:
        self.server = server
        self.page_errors: list[str] = []
        self.console_errors: list[str] = []
        self.foreign_requests: list[str] = []
        self._settings_file = server.user / "default" / "comfy.settings.json"
        # Without the first one the Templates dialog covers the canvas at the first start. Nothing
        # else is kept: what a tab before this one has opened or moved would still be there.
        self._write_settings({"Comfy.TutorialCompleted": True, **(settings or {})})
        self._context = browser.new_context(viewport=SCREEN, locale="en-US")
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda error: self.page_errors.append(str(error)))
        self.page.on(
            "console",
            lambda line: self.console_errors.append(line.text) if line.type == "error" else None,
        )
        self.page.route(lambda url: _foreign(url), self._refuse)
        self.open()

    def open(self) -> None:
        """Load the page, or load it again, and wait until the graph is there."""
        self.page.goto(self.server.url)
        self.page.wait_for_function("window.app && window.app.graph && window.app.canvas")

    def load_workflow(self, workflow: Path | dict[str, Any], name: str = "workflow.json") -> None:
        """Drop a UI-format workflow file onto the canvas and wait until its nodes are there."""
        if isinstance(workflow, Path):
            name, text = workflow.name, workflow.read_text(encoding="utf-8")
        else:
            text = json.dumps(workflow)
        ids = sorted(str(node["id"]) for node in json.loads(text)["nodes"])
        self.page.evaluate(DROP_FILE, [name, text])
        self.page.wait_for_function(
            "ids => JSON.stringify(window.app.graph._nodes.map(n => String(n.id)).sort())"
            " === JSON.stringify(ids)",
            arg=ids,
        )

    def dialog_text(self) -> str:
        """Wait for a dialog, such as the one about missing nodes or models; return its text."""
        dialog = self.page.locator("[role=dialog]").last
        dialog.wait_for(state="visible")
        return dialog.inner_text()

    def close_dialogs(self) -> None:
        """Close every open dialog: they cover the canvas and the Run button."""
        dialogs = self.page.locator("[role=dialog]")
        for _ in range(20):
            if dialogs.count() == 0:
                return
            button = dialogs.last.locator(CLOSE_BUTTONS)
            if button.count():
                button.first.click()
            else:
                self.page.keyboard.press("Escape")
            self.page.wait_for_timeout(500)
        raise AssertionError("a dialog stays open: " + dialogs.first.inner_text()[:300])

    def node_types(self) -> list[str]:
        """Return the types of all nodes that the frontend knows."""
        return self.page.evaluate("Object.keys(window.LiteGraph.registered_node_types)")

    def missing_types(self) -> list[str]:
        """Return the types of nodes in the graph that the frontend does not know."""
        return self.page.evaluate(
            "window.app.graph._nodes.map(n => n.type)"
            ".filter(t => !(t in window.LiteGraph.registered_node_types))"
        )

    def press_run(self) -> str:
        """Press the Run button and return the id of the queued prompt.

        Raises:
            PromptError: ComfyUI refused the prompt.
        """
        with self.page.expect_response(
            lambda answer: (
                urlsplit(answer.url).path.endswith("/prompt") and answer.request.method == "POST"
            )
        ) as waiting:
            # A closing dialog's mask can miss the end of its animation in a headless browser.
            self.page.evaluate(
                "document.querySelectorAll('.p-overlay-mask-leave').forEach(mask => mask.remove())"
            )
            self.page.get_by_role("button", name="Run", exact=True).click()
        answer = waiting.value
        if answer.status != 200:
            raise PromptError(f"the prompt was refused with status {answer.status}", answer.json())
        return answer.json()["prompt_id"]

    def run(self, timeout: float = 300.0) -> PromptResult:
        """Press Run and wait for the end of the prompt."""
        return self.server.wait(self.press_run(), timeout)

    def cancel(self) -> None:
        """Press the button that cancels the running prompt."""
        self.page.get_by_role("button", name="Cancel current run").click()

    def screenshot(self, path: Path) -> Path:
        """Save what the tab shows, 1920x1080."""
        self.page.screenshot(path=str(path))
        return path

    def close(self) -> None:
        """Close the tab and forget its settings."""
        self._context.close()
        self._write_settings({})

    def _write_settings(self, settings: dict[str, Any]) -> None:
        """Replace the file: the server has no route that removes a setting."""
        self._settings_file.parent.mkdir(parents=True, exist_ok=True)
        self._settings_file.write_text(json.dumps(settings), encoding="utf-8")

    def _refuse(self, route: Any) -> None:
        self.foreign_requests.append(route.request.url)
        route.abort()


def _foreign(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in (
        HOST,
        "localhost",
    )
