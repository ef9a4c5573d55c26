"""Write `workflows/*.json` from the nodes' own descriptions: ``python scripts/make_workflows.py``.

The descriptions come from the real ComfyUI of the tests, so every widget value stands where the
frontend expects it. The result depends on nothing else: running it again changes no byte.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "workflows"
for place in (ROOT / "scripts", ROOT / "tests" / "host"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import workflow_pages  # noqa: E402
from harness import run_in_comfy  # noqa: E402

_DESCRIBE = """
import asyncio
import nodes as stock


async def describe():
    await stock.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False)
    extension = await pack.comfy_entrypoint()
    classes = dict(stock.NODE_CLASS_MAPPINGS)
    for cls in await extension.get_node_list():
        classes[cls.GET_SCHEMA().node_id] = cls
    from comfy_api.internal import _ComfyNodeInternal
    found = {}
    for name in [n for n in classes if n.startswith("FlashGRPO")] + wanted:
        cls = classes[name]
        if issubclass(cls, _ComfyNodeInternal):
            found[name] = cls.GET_NODE_INFO_V1()
            continue
        inputs = cls.INPUT_TYPES()
        types = list(cls.RETURN_TYPES)
        found[name] = {
            "input": inputs,
            "input_order": {kind: list(entries) for kind, entries in inputs.items()},
            "output": types,
            "output_name": list(getattr(cls, "RETURN_NAMES", types)),
            "category": cls.CATEGORY,
        }
    return found


report(info=asyncio.run(describe()))
"""


@functools.cache
def describe() -> dict[str, Any]:
    """Describe all nodes of the pack, and the stock nodes in use, as `/object_info` does."""
    wanted = sorted(workflow_pages.STOCK_NODES)
    with tempfile.TemporaryDirectory() as folder:
        return run_in_comfy(_DESCRIBE, Path(folder), pack=ROOT, wanted=wanted)["info"]


def build(info: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the text of every workflow by file name."""
    info = describe() if info is None else info
    made = {f"{name}.json": page(info, name) for name, page in workflow_pages.PAGES.items()}
    return {
        name: json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        for name, document in made.items()
    }


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in build().items():
        path = FOLDER / name
        changed = not path.exists() or path.read_text(encoding="utf-8") != text
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"{'wrote' if changed else 'same '} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
