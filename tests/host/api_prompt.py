"""Turn a saved workflow (UI format) into the prompt that the frontend queues (API format)."""

from __future__ import annotations

from typing import Any

#: Nodes that only the frontend knows.
NOTES = {"MarkdownNote", "Note"}
BYPASSED = 4
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}


def api_prompt(workflow: dict[str, Any], info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert a workflow.

    Args:
        workflow: the content of a workflow file, without subgraphs.
        info: the server's `/object_info`.

    Returns:
        The prompt: node id -> class and inputs. Bypassed nodes, and notes, are not in it.
    """
    nodes = {
        node["id"]: node
        for node in workflow["nodes"]
        if node["type"] not in NOTES and node.get("mode", 0) != BYPASSED
    }
    prompt: dict[str, dict[str, Any]] = {}
    for number, node in nodes.items():
        values = list(node.get("widgets_values", []))
        inputs: dict[str, Any] = {}
        for name, spec in _inputs(info[node["type"]]):
            options = spec[1] if len(spec) > 1 else {}
            if (isinstance(spec[0], list) or spec[0] in WIDGETS) and not options.get("forceInput"):
                inputs[name] = values.pop(0)
                if options.get("control_after_generate") or options.get("image_upload"):
                    values.pop(0)  # of a widget that the frontend itself puts there
        assert not values, f"{node['type']} has more values than widgets: {values}"
        prompt[str(number)] = {"class_type": node["type"], "inputs": inputs}
    for _, source, slot, target, place, _ in workflow["links"]:
        if source in nodes and target in nodes:
            name = nodes[target]["inputs"][place]["name"]
            prompt[str(target)]["inputs"][name] = [str(source), slot]
    return prompt


def _inputs(node: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    return [
        (name, node["input"][kind][name])
        for kind in ("required", "optional")
        for name in node["input_order"].get(kind, [])
    ]
