"""Write help pages and locales from the nodes' own descriptions: ``python scripts/make_docs.py``.

`web/docs/<NodeId>.md` is the prose of `node_help.py` with a table of the inputs as the node
describes them. `locales/<language>/*.json` are the same texts for the interface; a translation is
looked up by the English text (`translations.py`), so that a text that changes is missed and not
shown in an old wording.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "scripts") not in sys.path:
    sys.path.insert(0, str(ROOT / "scripts"))

import translations  # noqa: E402
from interface_texts import INPUT_NAMES, MONITOR, OUTPUT_NAMES, TYPE_NAMES  # noqa: E402
from make_workflows import describe  # noqa: E402
from node_help import HELP, Help  # noqa: E402
from workflow_graph import Info, choices, widget_specs  # noqa: E402

DOCS = ROOT / "web" / "docs"
LOCALES = ROOT / "locales"
LANGUAGES = ("en", *translations.LANGUAGES)


def page(node_id: str, info: Info, help_: Help) -> str:
    """The help page of one node."""
    lines = [f"# {info['display_name']}", "", help_.about, ""]
    specs = widget_specs(info)
    rows = [_row(name, *spec, info) for name, spec in specs.items()]
    if rows:
        lines += ["## Inputs", "", "| Input | Values | What it does |", "|---|---|---|", *rows, ""]
    if set(help_.outputs) != set(info["output_name"]):
        raise ValueError(
            f"{node_id}: outputs {info['output_name']}, help has {list(help_.outputs)}"
        )
    lines += ["## Outputs", "", "| Output | What it is |", "|---|---|"]
    lines += [f"| **{name}** | {_cell(text)} |" for name, text in help_.outputs.items()]
    if help_.tips:
        lines += ["", "## Tips", "", *(f"- {tip}" for tip in help_.tips)]
    if help_.errors:
        lines += ["", "## Common errors", ""]
        lines += [f"- **{what}**: {fix}" for what, fix in help_.errors]
    return "\n".join(lines) + "\n"


def _row(name: str, kind: Any, options: dict[str, Any], is_widget: bool, info: Info) -> str:
    return f"| **{name}** | {_cell(_values(name, kind, options, is_widget, info))} | {_cell(options.get('tooltip', ''))} |"


def _values(name: str, kind: Any, options: dict[str, Any], is_widget: bool, info: Info) -> str:
    optional = "" if name in info["input_order"].get("required", []) else "optional "
    if not is_widget:
        return optional + "link " + " or ".join(TYPE_NAMES.get(t, t) for t in kind.split(","))
    folded = ", advanced" if options.get("advanced") else ""
    listed = choices(kind, options)
    if listed is not None:
        # Lists of files differ by computer; their tooltips say what is listed.
        fixed = [v for v in listed if "." not in str(v)]
        return ", ".join(f"`{value}`" for value in fixed) + folded
    if kind in ("INT", "FLOAT"):
        low, high = options.get("min"), options.get("max")
        return f"{_number(low)} to {_number(high)}, default {_number(options['default'])}" + folded
    if kind == "BOOLEAN":
        return f"on, off; default {'on' if options['default'] else 'off'}" + folded
    return ("text, several lines" if options.get("multiline") else "text") + folded


def _number(value: float) -> str:
    if value == 2**53 - 1:
        return "2^53 - 1"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;").replace(">", "&gt;")


#: Sentences that hold values; the rest of a text is looked up.
_VALUES = re.compile(r"Range (\S+) to (\S+?)\.(?= |$)|(-?\d+|preset) = the preset's value\.")


class Translator:
    """Looks texts up and remembers those that have no translation."""

    def __init__(self, language: str) -> None:
        self.index = None if language == "en" else translations.LANGUAGES.index(language)
        self.missing: list[str] = []
        self.used: set[str] = set()

    def __call__(self, text: str) -> str:
        if self.index is None or not text:
            return text
        pieces, end = [], 0
        for match in _VALUES.finditer(text):
            pieces.append(self._look_up(text[end : match.start()]))
            low, high, value = match.groups()
            if value is None:
                pieces.append(translations.RANGE[self.index].format(low, high))
            else:
                pieces.append(translations.PRESET_VALUE[self.index].format(value))
            end = match.end()
        pieces.append(self._look_up(text[end:]))
        return " ".join(piece for piece in pieces if piece)

    def _look_up(self, piece: str) -> str:
        piece = piece.strip()
        if not piece:
            return ""
        self.used.add(piece)
        if piece in translations.TEXTS:
            return translations.TEXTS[piece][self.index]
        if piece not in self.missing:
            self.missing.append(piece)
        return piece


def node_definitions(info: dict[str, Info], say: Translator) -> dict[str, Any]:
    """`nodeDefs.json` of one language."""
    found = {}
    for node_id in sorted(info):
        node = info[node_id]
        inputs = {}
        for name, (_, options, _) in widget_specs(node).items():
            own = INPUT_NAMES.get(f"{node_id}.{name}", INPUT_NAMES.get(name))
            entry = {"name": say(own or name.replace("_", " "))}
            if options.get("tooltip"):
                entry["tooltip"] = say(options["tooltip"])
            # A dot would end the key for the frontend; no input of ours has one.
            inputs[name] = entry
        outputs = {}
        for slot, name in enumerate(node["output_name"]):
            outputs[str(slot)] = {"name": say(OUTPUT_NAMES.get(name, name.replace("_", " ")))}
            outputs[str(slot)]["tooltip"] = say(HELP[node_id].outputs[name])
        found[node_id] = {
            "display_name": say(node["display_name"]),
            "description": say(node["description"]),
            "inputs": inputs,
            "outputs": outputs,
        }
    return found


def main_texts(say: Translator) -> dict[str, Any]:
    """`main.json` of one language: menus, link types, the monitor."""
    return {
        "nodeCategories": {"Flash-GRPO": "Flash-GRPO", "rewards": say("rewards")},
        "dataTypes": {kind: say(name) for kind, name in TYPE_NAMES.items()},
        "flashgrpo": {key: say(text) for key, text in MONITOR.items()},
    }


def build(info: dict[str, Info]) -> dict[Path, str]:
    """Return the text of every file.

    Raises:
        ValueError: a node without help, help without a node, or a missing translation.
    """
    info = {name: node for name, node in info.items() if name.startswith("FlashGRPO")}
    if set(info) != set(HELP):
        raise ValueError(f"nodes without help or help without node: {set(info) ^ set(HELP)}")
    files = {DOCS / f"{name}.md": page(name, node, HELP[name]) for name, node in info.items()}
    for language in LANGUAGES:
        say = Translator(language)
        folder = LOCALES / language
        files[folder / "nodeDefs.json"] = _json(node_definitions(info, say))
        files[folder / "main.json"] = _json(main_texts(say))
        if say.missing:
            texts = json.dumps(say.missing, indent=0, ensure_ascii=False)
            raise ValueError(f"{language}: {len(say.missing)} texts without translation:\n{texts}")
        unused = sorted(set(translations.TEXTS) - say.used) if say.index is not None else []
        if unused:
            raise ValueError(f"{language}: translations of texts that are gone: {unused}")
    return files


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the files, and remove pages of nodes that are gone."""
    files = build(describe())
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    for path in DOCS.glob("*.md"):
        if path not in files:
            path.unlink()
    print(f"wrote {len(files)} files")


if __name__ == "__main__":
    main()
