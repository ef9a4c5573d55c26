"""Write the tables of `docs/rewards.md` from the reward classes: ``python scripts/make_reward_docs.py``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from flashgrpo_core.rewards import REWARDS, option_defaults  # noqa: E402
from flashgrpo_core.rewards.terms import is_group_wise  # noqa: E402

PAGE = ROOT / "docs" / "rewards.md"
BEGIN, END = "<!-- made by scripts/make_reward_docs.py -->\n", "<!-- end -->"


def build() -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: the page has no place for them.
    """
    text = PAGE.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks {BEGIN!r} or {END!r}")
    served = [cls for cls in REWARDS.values() if getattr(cls, "served", False)]
    models = [cls for cls in REWARDS.values() if hasattr(cls, "memory")]
    offline = [cls for cls in REWARDS.values() if cls not in served + models]
    tables = [_table("### Without weights", offline, "cost")]
    if models:
        tables.append(_table("### With a model", models, "memory of the weights"))
        tables.append(_sources(models))
    if served:
        tables.append(_table("### In another process", served, "cost"))
    return head + begin + "\n" + "\n\n".join(tables) + "\n\n" + end + tail


def _table(title: str, rewards: list[Any], price: str) -> str:
    rows = [f"| `name` | what it rewards | range | options | {price} | how it is cheated |"]
    rows.append("|---|---|---|---|---|---|")
    for cls in rewards:
        options = [_option(key, value) for key, value in option_defaults(cls).items()]
        about = cls.description
        if is_group_wise(cls):
            about += " Compares the videos of a group."
        parts = getattr(cls, "parts", ())
        if parts:
            about += f" Parts: {', '.join(f'`{part}`' for part in parts)}."
        cost = getattr(cls, "memory", None) or getattr(cls, "cost", "that of the other process")
        cells = [f"`{cls.name}`", about, f"{cls.range}; {cls.direction}", ", ".join(options)]
        cells += [cost, cls.hackable_by]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return f"{title}\n\n" + "\n".join(rows)


def _sources(rewards: list[Any]) -> str:
    rows = ["| `name` | where the weights come from | licence |", "|---|---|---|"]
    for cls in rewards:
        source, licence = getattr(cls, "source", ""), getattr(cls, "licence", "")
        rows.append(f"| `{cls.name}` | {source} | {licence} |".replace("\n", " "))
    return "\n".join(rows)


def _option(key: str, value: Any) -> str:
    if value is inspect.Parameter.empty:
        return f"`{key}` (needed)"
    return f"`{key} = {_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    PAGE.write_text(build(), encoding="utf-8", newline="\n")
    print(f"wrote {PAGE.relative_to(ROOT)}")
