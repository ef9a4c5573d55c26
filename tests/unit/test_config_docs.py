"""The settings page says what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_config_docs.py"))
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == script["page"]()
