"""Build ComfyUI workflow files (UI format) from the live descriptions of the nodes.

The values of a saved node are positional, so they are never written by hand: `Graph.add` takes
widgets and links by name, checks them against the node's own description and puts them in order.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, field
from typing import Any

Info = dict[str, Any]

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
#: Pixels at zoom 1, measured in the frontends; the highest of the renderers decides how high a node
#: is made.
TITLE = 30
SLOT = 20
NEW_WIDGET = 30  # Nodes 2.0
NEW_LINE = 10  # more for a line of text
NEW_BADGE = 36  # name of the pack
NEW_FOOTER = 28  # "Show advanced inputs"
MULTILINE = 100
MONITOR = 264
PICTURE = 290  # what a node shows after running, and the line of text while it runs
PADDING = 14
GAP = 26  # between nodes of a column
GROUP_TITLE = 44
GROUP_MARGIN = 14
COLUMN_GAP = 54
#: The part of a 1920x1080 screen that the frontends leave free for the graph: left, top, right,
#: bottom. The old frontend's first-start banner is counted in.
SCREEN = (85, 112, 1905, 1018)
#: The old frontend's Nodes 2.0 renderer spreads a workflow by this factor.
SPREAD = 1.2
LARGEST_SCALE = 0.9


@dataclass(frozen=True)
class Output:
    """One output slot of a node."""

    node: Node
    slot: int
    type: str


@dataclass
class Node:
    """One node of the graph; `node["name"]` is its output of that name."""

    id: int
    type: str
    info: Info | None
    title: str | None
    size: tuple[float, float]
    widgets: list[Any]
    inputs: list[dict[str, Any]]
    properties: dict[str, Any]
    mode: int = 0
    colour: str | None = None
    collapsed: bool = False
    pos: tuple[float, float] = (0.0, 0.0)
    links: dict[int, list[int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Output:
        assert self.info is not None, f"{self.type} has no outputs"
        names = self.info["output_name"]
        if names.count(name) != 1:
            raise KeyError(f"{self.type} has no single output {name!r}, it has {names}")
        slot = names.index(name)
        return Output(self, slot, str(self.info["output"][slot]))

    @property
    def bottom(self) -> float:
        """Lower edge of the node; only the title of a collapsed one is there."""
        return self.pos[1] + (0 if self.collapsed else self.size[1])


def widget_specs(info: Info) -> dict[str, tuple[Any, dict[str, Any], bool]]:
    """All inputs of a node in order: name -> (type, options, whether it is a widget)."""
    found = {}
    for kind in ("required", "optional"):
        for name in info["input_order"].get(kind, []):
            spec = info["input"][kind][name]
            options = spec[1] if len(spec) > 1 else {}
            is_widget = (isinstance(spec[0], list) or spec[0] in WIDGET_TYPES) and not options.get(
                "forceInput"
            )
            found[name] = (spec[0], options, is_widget)
    return found


def choices(type_: Any, options: dict[str, Any]) -> list[Any] | None:
    """The values of a combo, or None for other inputs."""
    if isinstance(type_, list):
        return type_
    return options.get("options") if type_ == "COMBO" else None


def companions(name: str, type_: Any, options: dict[str, Any]) -> list[str]:
    """Values of the widgets that the frontend itself puts behind this one."""
    if type_ == "INT" and options.get("control_after_generate", name in ("seed", "noise_seed")):
        return ["fixed"]
    return ["image"] if options.get("image_upload") else []


class Graph:
    """One workflow under construction.

    Args:
        info: descriptions of all node types, as `/object_info` gives them.
        name: file name without ending; it also seeds the workflow's id.
    """

    def __init__(self, info: dict[str, Info], name: str) -> None:
        self.info = info
        self.name = name
        self.nodes: list[Node] = []
        self.links: list[list[Any]] = []
        self.groups: list[dict[str, Any]] = []

    def add(
        self,
        type_: str,
        *,
        width: float = 300,
        height: float | None = None,
        title: str | None = None,
        mode: int = 0,
        colour: str | None = None,
        models: list[dict[str, str]] | None = None,
        picture: bool = False,
        listed: bool = True,
        fields: dict[str, Any] | None = None,
        **values: Any,
    ) -> Node:
        """Add a node.

        Args:
            type_: node type.
            width: width.
            height: height without the title; default from the number of slots and widgets.
            title: replaces the display name.
            mode: 0 always, 2 never, 4 bypass.
            colour: title colour.
            models: files that the node needs, for the missing-models dialog.
            picture: whether the node shows a picture below its widgets after running.
            listed: False where combo values name files that are not on this computer.
            fields: further values, for inputs that are called like one of the above.
            values: widgets by name, and `Output` objects for links.

        Raises:
            ValueError: an unknown input, a value that its widget does not allow, or a required
                input or combo without a value.
        """
        info = self.info[type_]
        specs = widget_specs(info)
        values |= fields or {}
        unknown = sorted(set(values) - set(specs))
        if unknown:
            raise ValueError(f"{type_} has no input {unknown[0]!r}; it has {', '.join(specs)}")
        sockets, widget_sockets, widgets = [], [], []
        node = Node(len(self.nodes) + 1, type_, info, title, (0, 0), widgets, [], {}, mode, colour)
        shown = hidden = texts = lines = 0
        for name, (kind, options, is_widget) in specs.items():
            value = values.get(name)
            link = value if isinstance(value, Output) else None
            socket = {"name": name, "type": _type_name(kind), "link": None, "_from": link}
            if not is_widget:
                if link is None and name in info["input_order"].get("required", []):
                    raise ValueError(f"{type_} needs {name!r}")
                if value is not None and link is None:
                    raise ValueError(f"{type_}.{name} takes a link, not {value!r}")
                sockets.append(socket)
                continue
            widgets.append(self._value(type_, name, kind, options, value, listed))
            more = companions(name, kind, options)
            widgets += more
            shown += len(more)
            if options.get("multiline"):
                texts += 1
            elif options.get("advanced"):
                hidden += 1
            else:
                shown += 1
                lines += kind == "STRING"
            if not options.get("socketless"):
                widget_sockets.append({**socket, "widget": {"name": name}})
        node.inputs = sockets + widget_sockets
        node.properties = {"Node name for S&R": type_, "cnr_id": _pack(info)}
        if models:
            node.properties["models"] = models
        if height is None:
            rows = max(len(sockets), len(info["output"])) * SLOT + texts * MULTILINE
            new = rows + shown * NEW_WIDGET + lines * NEW_LINE
            new += NEW_BADGE if _pack(info) != "comfy-core" else 0
            # The old frontend's Nodes 2.0 folds nothing away.
            open_ = rows + (shown + hidden) * NEW_WIDGET
            height = max(new + (NEW_FOOTER if hidden else 0), open_) + PADDING
            height += (PICTURE if picture else 0) + (MONITOR if type_ == "FlashGRPOTrain" else 0)
        node.size = (width, math.ceil(height / 10) * 10)
        self.nodes.append(node)
        return node

    def note(self, text: str, *, width: float, height: float, title: str) -> Node:
        """Add a Markdown note."""
        node = Node(
            len(self.nodes) + 1, "MarkdownNote", None, title, (width, height), [text], [], {}
        )
        node.colour = "#432"
        self.nodes.append(node)
        return node

    def column(self, x: float, *nodes: Node | None) -> float:
        """Place nodes below each other from the top on, and return the x of the next column.

        None between two nodes makes room for the title of a group that begins there.
        """
        y = width = 0.0
        for node in nodes:
            if node is None:
                y += GROUP_TITLE + GROUP_MARGIN
                continue
            node.pos = (x, y + TITLE)
            y = node.bottom + GAP
            width = max(width, node.size[0])
        return x + width + COLUMN_GAP

    def group(self, title: str, colour: str, *nodes: Node) -> None:
        """Draw a titled frame around nodes that have their places."""
        left = min(n.pos[0] for n in nodes) - GROUP_MARGIN
        top = min(n.pos[1] for n in nodes) - TITLE - GROUP_TITLE
        right = max(n.pos[0] + n.size[0] for n in nodes) + GROUP_MARGIN
        bottom = max(n.bottom for n in nodes) + GROUP_MARGIN
        self.groups.append(
            {
                "id": len(self.groups) + 1,
                "title": title,
                "bounding": [left, top, right - left, bottom - top],
                "color": colour,
                "font_size": 24,
                "flags": {},
            }
        )

    def bounds(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of everything."""
        boxes = [(*n.pos, n.pos[0] + n.size[0], n.bottom) for n in self.nodes]
        boxes = [(x, y - TITLE, r, b) for x, y, r, b in boxes]
        for group in self.groups:
            x, y, w, h = group["bounding"]
            boxes.append((x, y, x + w, y + h))
        return (
            min(b[0] for b in boxes),
            min(b[1] for b in boxes),
            max(b[2] for b in boxes),
            max(b[3] for b in boxes),
        )

    def document(self) -> dict[str, Any]:
        """The workflow file; it opens at the largest zoom at which all of it is visible."""
        self.links = []
        for node in self.nodes:
            node.links = {}
        for node in self.nodes:
            for slot, socket in enumerate(node.inputs):
                source: Output | None = socket.pop("_from", None)
                if source is None:
                    continue
                number = len(self.links) + 1
                socket["link"] = number
                source.node.links.setdefault(source.slot, []).append(number)
                self.links.append([number, source.node.id, source.slot, node.id, slot, source.type])
        x, y, right, bottom = self.bounds()
        wide = (SCREEN[2] - SCREEN[0]) / (right - x) / SPREAD
        high = (SCREEN[3] - SCREEN[1]) / (bottom - y) / SPREAD
        scale = math.floor(min(wide, high, LARGEST_SCALE) * 100) / 100
        offset = [round(SCREEN[0] / scale - x, 1), round(SCREEN[1] / scale - y, 1)]
        order = self._order()
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"flashgrpo.{self.name}")),
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(self.links),
            "nodes": [self._node(node, order[node.id]) for node in self.nodes],
            "links": self.links,
            "groups": self.groups,
            "config": {},
            "extra": {"ds": {"scale": scale, "offset": offset}},
            "version": 0.4,
        }

    def _node(self, node: Node, order: int) -> dict[str, Any]:
        result: dict[str, Any] = {
            "id": node.id,
            "type": node.type,
            "pos": list(node.pos),
            "size": list(node.size),
            "flags": {"collapsed": True} if node.collapsed else {},
            "order": order,
            "mode": node.mode,
            "inputs": node.inputs,
            "outputs": [],
            "properties": node.properties,
            "widgets_values": node.widgets,
        }
        if node.info is not None:
            pairs = zip(node.info["output_name"], node.info["output"], strict=True)
            result["outputs"] = [
                {
                    "name": name,
                    "type": _type_name(kind),
                    "slot_index": slot,
                    "links": node.links.get(slot),
                }
                for slot, (name, kind) in enumerate(pairs)
            ]
        if node.title:
            result["title"] = node.title
        if node.colour:
            result["color"] = node.colour
            result["bgcolor"] = {"#432": "#32281a"}.get(node.colour, node.colour)
        return result

    def _order(self) -> dict[int, int]:
        """Position of each node in the order of execution."""
        needs = {node.id: set() for node in self.nodes}
        for _, source, _, target, _, _ in self.links:
            needs[target].add(source)
        order: dict[int, int] = {}
        while len(order) < len(self.nodes):
            ready = [i for i in needs if i not in order and needs[i] <= order.keys()]
            if not ready:
                raise ValueError(f"{self.name}: the links form a circle")
            for node_id in ready:
                order[node_id] = len(order)
        return order

    def _value(
        self,
        type_: str,
        name: str,
        kind: Any,
        options: dict[str, Any],
        value: Any,
        listed: bool,
    ) -> Any:
        if isinstance(value, Output):
            value = None
        allowed = choices(kind, options)
        if value is None:
            value = options.get("default")
            if value is None and allowed is not None:
                raise ValueError(f"{type_}.{name} needs a value: its list differs by computer")
        if allowed is not None:
            if listed and value not in allowed:
                raise ValueError(f"{type_}.{name} = {value!r} is not one of {allowed}")
            return value
        if kind in ("INT", "FLOAT"):
            low, high = options.get("min", -math.inf), options.get("max", math.inf)
            if isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{type_}.{name} = {value!r} is outside {low} to {high}")
        elif not isinstance(value, {"STRING": str, "BOOLEAN": bool}[kind]):
            raise ValueError(f"{type_}.{name} = {value!r} is no {kind}")
        return value


def _type_name(kind: Any) -> str:
    return "COMBO" if isinstance(kind, list) else str(kind)


def _pack(info: Info) -> str:
    return "flashgrpo" if info["category"].startswith("Flash-GRPO") else "comfy-core"
