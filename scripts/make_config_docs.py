"""Write `docs/configuration.md` from the configuration's own help texts.

python scripts/make_config_docs.py
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashgrpo_core.config import PAPER, TINY, Config  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"


def page() -> str:
    """The page as Markdown."""
    lines = [
        "# Settings of a run",
        "",
        "Made by `python scripts/make_config_docs.py` from `flashgrpo_core/config.py`. A job file is TOML",
        "with these tables; what it leaves out has the default. `--set table.key=value` overrides one.",
        "Settings marked * do not change what is trained and may differ when a run is resumed.",
        "",
    ]
    config = Config()
    for table in dataclasses.fields(Config):
        values = getattr(config, table.name)
        lines += [f"## [{table.name}]", "", (type(values).__doc__ or "").splitlines()[0], ""]
        lines += ["| key | default | allowed | meaning |", "|---|---|---|---|"]
        for field in dataclasses.fields(values):
            meta = field.metadata
            mark = "" if meta["identity"] else " *"
            default = json.dumps(getattr(values, field.name))
            lines.append(
                f"| `{field.name}`{mark} | `{default}` | {allowed(meta)} | {meta['help']} |"
            )
        lines.append("")
    for title, preset in (("preset `paper`", PAPER), ("the embedded tiny model", TINY)):
        lines += [f"## Other defaults: {title}", ""]
        lines += [
            f"- `{table}.{key}` = `{json.dumps(value)}`"
            for table, values in preset.items()
            for key, value in values.items()
        ]
        lines.append("")
    return "\n".join(lines)


def allowed(meta) -> str:
    """The range or the choices in words."""
    if meta["choices"]:
        return ", ".join(f"`{choice}`" for choice in meta["choices"])
    if meta["low"] is not None or meta["high"] is not None:
        return f"{meta['low']:g} to {meta['high']:g}"
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
