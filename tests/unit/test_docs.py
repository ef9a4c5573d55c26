"""Help pages, locales and starter prompts agree with the nodes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from archive import scan_text

from flashgrpo_core.prompts import read_prompts

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import make_docs  # noqa: E402
from interface_texts import MONITOR  # noqa: E402
from workflow_graph import widget_specs  # noqa: E402

SCRIPT = REPO / "web" / "flashgrpo.js"
SECTIONS = ("## Inputs", "## Outputs", "## Tips", "## Common errors")


@pytest.fixture(scope="module")
def info() -> dict[str, Any]:
    """Descriptions of the pack's nodes from the real ComfyUI."""
    described = make_docs.describe()
    return {name: node for name, node in described.items() if name.startswith("FlashGRPO")}


def test_making_them_again_changes_nothing(info: dict[str, Any]) -> None:
    made = make_docs.build(info)
    there = {*make_docs.DOCS.rglob("*.md"), *make_docs.LOCALES.rglob("*.json")}
    assert there == set(made)
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.relative_to(REPO)} is out of date: run python scripts/make_docs.py"
        )


def test_every_node_has_a_page_that_names_all_it_has(info: dict[str, Any]) -> None:
    for node_id, node in info.items():
        page = (make_docs.DOCS / f"{node_id}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {node['display_name']}\n")
        for name in [*widget_specs(node), *node["output_name"]]:
            assert f"| **{name}** |" in page, f"{node_id}: {name}"
        wanted = SECTIONS[:3] if "Reward" in node_id else SECTIONS
        assert all(section in page for section in wanted), node_id
        assert len(page) > 700, node_id


def test_ranges_stand_in_the_pages(info: dict[str, Any]) -> None:
    for node_id, node in info.items():
        page = (make_docs.DOCS / f"{node_id}.md").read_text(encoding="utf-8")
        for name, (kind, options, _) in widget_specs(node).items():
            if kind in ("INT", "FLOAT"):
                row = next(line for line in page.splitlines() if line.startswith(f"| **{name}** |"))
                assert re.search(r"\| -?[\d^]\S*(?: - 1)? to \S+.*default", row), row
            if options.get("tooltip") is None:
                raise AssertionError(f"{node_id}.{name} has no tooltip")


@pytest.mark.parametrize("language", make_docs.LANGUAGES)
def test_locales_are_complete(language: str, info: dict[str, Any]) -> None:
    folder = make_docs.LOCALES / language
    nodes = json.loads((folder / "nodeDefs.json").read_text(encoding="utf-8"))
    assert set(nodes) == set(info)
    for node_id, node in info.items():
        entry = nodes[node_id]
        assert entry["display_name"] and entry["description"]
        assert list(entry["inputs"]) == list(widget_specs(node))
        assert sorted(entry["outputs"]) == [str(i) for i in range(len(node["output"]))]
        for part in (*entry["inputs"].values(), *entry["outputs"].values()):
            assert part["name"] and part["tooltip"]
    main = json.loads((folder / "main.json").read_text(encoding="utf-8"))
    assert set(main["flashgrpo"]) == set(MONITOR)
    assert "{time}" in main["flashgrpo"]["time_left"]


@pytest.mark.parametrize(("language", "script"), [("ko", "[가-힣]"), ("zh", "[一-鿿]")])
def test_translations_are_in_the_language(language: str, script: str) -> None:
    nodes = json.loads((make_docs.LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))
    for node_id, entry in nodes.items():
        texts = [entry["display_name"], entry["description"]]
        for part in (*entry["inputs"].values(), *entry["outputs"].values()):
            texts.append(part["tooltip"])
        for text in texts:
            assert re.search(script, text), f"{node_id}: {text}"


def test_numbers_survive_translation() -> None:
    english = json.loads((make_docs.LOCALES / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    for language in ("ko", "zh"):
        path = make_docs.LOCALES / language / "nodeDefs.json"
        translated = json.loads(path.read_text(encoding="utf-8"))
        for node_id, entry in english.items():
            for name, part in entry["inputs"].items():
                other = translated[node_id]["inputs"][name]["tooltip"]
                for number in re.findall(r"\d+(?:\.\d+)?(?:e[+-]\d+)?", part["tooltip"]):
                    assert number in other, f"{language} {node_id}.{name}: {number} in {other}"


def test_the_monitor_knows_the_same_texts() -> None:
    """The script has the English texts for servers without locales."""
    block = re.search(r"const TEXT = \{(.*?)\n\};", SCRIPT.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    assert dict(re.findall(r'^  (\w+): "(.*)",$', block[1], re.MULTILINE)) == MONITOR


def test_the_web_folder_is_harmless() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert scan_text("web/flashgrpo.js", text) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
    addresses = set(re.findall(r"https?://[^\"'\s]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of the SVG namespace"
    for path in (REPO / "web" / "docs").rglob("*.md"):
        content = path.read_text(encoding="utf-8")
        assert scan_text(path.name, content) == []
        assert "http" not in content


def test_starter_prompts() -> None:
    prompts = [p.text for p in read_prompts(REPO / "flashgrpo_core/assets/prompts/starter.txt")]
    assert len(prompts) >= 40
    assert len({p.lower() for p in prompts}) == len(prompts)
    assert all(60 <= len(p) <= 400 for p in prompts)
    # Varied, not one sentence with other words filled in.
    assert len({tuple(p.lower().split()[:4]) for p in prompts}) >= 0.95 * len(prompts)
