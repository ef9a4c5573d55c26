"""What a person sees of an opened workflow: where nodes are, what covers what, the monitor."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frontend import Frontend

REPO = Path(__file__).resolve().parents[2]
WORKFLOWS = REPO / "workflows"
#: For looking at; not part of the repository.
SCREENSHOTS = REPO / ".cache" / "screenshots"
#: ComfyUI's own frontend and the newest tested one.
FRONTENDS = ("old", "new")
RENDERERS = ("classic", "nodes2")
#: The smallest training that is one, for Advanced Training Settings.
SMALL = {
    "group_size": 4,
    "prompts_per_iteration": 2,
    "validation_prompts": 2,
    "validation_seeds": 1,
    "test_prompts": 2,
    "test_seeds": 1,
}
#: What the frontends leave free of menus on a 1920x1080 screen: left, top, right, bottom. The
#: canvas of the old frontend begins lower while its first-start banner is there.
FREE = (60, 60, 1920, 1080)

# Screen rectangles of all nodes, as [id, title, left, top, right, bottom].
_BOXES = """vue => {
  const view = window.app.canvas, ds = view.ds, screen = view.canvas.getBoundingClientRect();
  return window.app.graph._nodes.map(node => {
    let box;
    if (vue) {
      const r = document.querySelector(`[data-node-id="${node.id}"]`).getBoundingClientRect();
      box = [r.left, r.top, r.right, r.bottom];
    } else {
      const x = (node.pos[0] + ds.offset[0]) * ds.scale + screen.left;
      const y = (node.pos[1] - 30 + ds.offset[1]) * ds.scale + screen.top;
      const [width, height] = node.flags.collapsed ? [node._collapsed_width, 0] : node.size;
      box = [x, y, x + width * ds.scale, y + (height + 30) * ds.scale];
    }
    return [String(node.id), node.title || node.type, ...box];
  });
}"""

# What sticks out: pictures, videos and widgets of a node beyond its edges, and nodes of a group
# beyond the group's. A node belongs to the group that its upper left corner is in.
_STICKING_OUT = """([vue, boxes]) => {
  const view = window.app.canvas, ds = view.ds, screen = view.canvas.getBoundingClientRect();
  const inside = (a, b) => a[0] >= b[0] - 2 && a[1] >= b[1] - 2 && a[2] <= b[2] + 2 && a[3] <= b[3] + 2;
  const found = [];
  for (const media of document.querySelectorAll(".dom-widget video, .dom-widget img, .flashgrpo-monitor")) {
    const r = media.getBoundingClientRect();
    if (vue || r.width === 0 || r.height === 0) continue;
    const own = boxes.find(b => r.left >= b[1] - 2 && r.left < b[3] && r.top >= b[2] - 2 && r.top < b[4]);
    if (!own || !inside([r.left, r.top, r.right, r.bottom], own.slice(1))) {
      found.push(`${media.tagName} of ${own?.[0]}: ${[r.left, r.top, r.right, r.bottom].map(Math.round)}`);
    }
  }
  for (const group of window.app.graph._groups) {
    const [x, y] = [0, 1].map(i => (group.pos[i] + ds.offset[i]) * ds.scale + (i ? screen.top : screen.left));
    const edge = [x, y, x + group.size[0] * ds.scale, y + group.size[1] * ds.scale];
    for (const [name, ...box] of boxes) {
      const member = box[0] >= edge[0] && box[0] < edge[2] && box[1] >= edge[1] && box[1] < edge[3];
      if (member && !inside(box, edge)) found.push(`${name} out of ${group.title}`);
    }
  }
  return found;
}"""

_SET = """([type, values]) => {
  const node = window.app.graph._nodes.find(item => item.type === type);
  for (const [name, value] of Object.entries(values)) {
    const widget = node.widgets.find(item => item.name === name);
    if (!widget) throw new Error(`${type} has no widget ${name}`);
    widget.value = value;
    widget.callback?.(value);
  }
}"""

_MONITOR = """() => {
  const monitor = document.querySelector(".flashgrpo-monitor");
  if (!monitor) return null;
  const film = monitor.querySelector("img");
  return {
    status: monitor.dataset.status,
    points: Number(monitor.dataset.points),
    text: monitor.innerText,
    drawn: monitor.querySelectorAll("svg polyline, svg circle").length,
    film: film.hidden ? 0 : film.naturalWidth,
    finish: !monitor.querySelector("button").hidden,
    inside: monitor.scrollHeight <= monitor.clientHeight + 1,
  };
}"""


class WorkflowView:
    """One opened workflow in a tab.

    Args:
        tab: the tab.
        vue: whether it uses the Nodes 2.0 renderer.
    """

    def __init__(self, tab: Frontend, vue: bool) -> None:
        self.tab = tab
        self.vue = vue

    def open(self, name: str) -> dict[str, Any]:
        """Drop a workflow of the pack onto the canvas and return the file's content."""
        path = WORKFLOWS / f"{name}.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        self.tab.load_workflow(path)
        # Ids alone do not tell: the workflow before may have had the same ones.
        self.tab.page.wait_for_function(
            "types => JSON.stringify(window.app.graph._nodes.map(n => n.type).sort())"
            " === JSON.stringify(types)",
            arg=sorted(node["type"] for node in document["nodes"]),
        )
        if self.vue:
            self.tab.page.wait_for_function(
                "() => window.app.graph._nodes.every("
                "n => document.querySelector(`[data-node-id='${n.id}']`))"
            )
        self.tab.page.wait_for_timeout(1000)
        return document

    def set(self, node_type: str, **values: Any) -> None:
        """Set widgets of the node of a type."""
        self.tab.page.evaluate(_SET, [node_type, values])

    def boxes(self) -> dict[str, tuple[float, float, float, float]]:
        """Screen rectangles of all nodes by id and title."""
        rows = self.tab.page.evaluate(_BOXES, self.vue)
        return {f"{row[0]} {row[1]}": tuple(row[2:]) for row in rows}

    def overlaps(self) -> list[str]:
        """Pairs of nodes of which one covers a part of the other."""
        boxes = list(self.boxes().items())
        found = []
        for index, (first, a) in enumerate(boxes):
            for second, b in boxes[index + 1 :]:
                width = min(a[2], b[2]) - max(a[0], b[0])
                height = min(a[3], b[3]) - max(a[1], b[1])
                if width > 1 and height > 1:
                    found.append(f"{first} / {second}: {width:.0f}x{height:.0f}")
        return found

    def outside(self) -> list[str]:
        """Nodes that are not completely on the screen."""
        return [
            f"{name}: {[round(v) for v in box]}"
            for name, box in self.boxes().items()
            if box[0] < FREE[0] or box[1] < FREE[1] or box[2] > FREE[2] or box[3] > FREE[3]
        ]

    def sticking_out(self) -> list[str]:
        """What lies partly outside the node or group that it belongs to."""
        boxes = [[name, *box] for name, box in self.boxes().items()]
        return self.tab.page.evaluate(_STICKING_OUT, [self.vue, boxes])

    def check_tidy(self, name: str) -> None:
        """Take a screenshot; nothing covers anything, leaves the screen or sticks out."""
        self.screenshot(name)
        assert self.overlaps() == [], name
        assert self.outside() == [], name
        assert self.sticking_out() == [], name

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until pictures and videos of a finished run are shown."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tab.page.wait_for_timeout(1500)
            text = self.tab.page.evaluate("document.body.innerText")
            if "Loading..." not in text and "Calculating dimensions" not in text:
                return
        raise AssertionError(f"pictures still loading after {seconds:.0f} s")

    def monitor(self) -> dict[str, Any]:
        """What the monitor on the Train node shows."""
        state = self.tab.page.evaluate(_MONITOR)
        assert state is not None, "the Train node has no monitor"
        return state

    def wait_monitor(self, what: str, condition: Any, seconds: float = 240.0) -> dict[str, Any]:
        """Wait until the monitor's state fulfils a condition."""
        end = time.monotonic() + seconds
        while True:
            state = self.monitor()
            if condition(state):
                return state
            assert time.monotonic() < end, f"the monitor never showed {what}: {state}"
            self.tab.page.wait_for_timeout(300)

    def screenshot(self, name: str) -> None:
        """Keep a screenshot for people to look at."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.tab.screenshot(SCREENSHOTS / f"{name}.png")


#: The fixture `open_view`: (frontend, renderer, settings=None).
OpenView = Callable[..., WorkflowView]


def assert_no_errors(tab: Frontend, *, reloaded: bool = False) -> None:
    """No script of the page has failed; `reloaded` while a prompt ran."""
    # 1.32.9 throws this one when a page is left while a prompt runs.
    known = {"getCanvas: canvas is null"} if reloaded else set()
    assert [text for text in tab.page_errors if text not in known] == []
    # The frontend itself looks packs and models up on its maker's servers, which is refused here.
    assert [text for text in tab.console_errors if "flashgrpo.js" in text] == []
