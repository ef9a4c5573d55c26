"""docs/rewards.md names every reward as its class does."""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import make_reward_docs  # noqa: E402

from flashgrpo_core.rewards import REWARDS, RewardMix  # noqa: E402


def test_making_the_tables_again_changes_nothing() -> None:
    there = make_reward_docs.PAGE.read_text(encoding="utf-8")
    assert there == make_reward_docs.build(), "run python scripts/make_reward_docs.py"
    for cls in REWARDS.values():
        (row,) = (
            x for x in there.splitlines() if x.startswith(f"| `{cls.name}` | {cls.description[:9]}")
        )
        assert cls.range in row and cls.hackable_by in row


def test_the_terms_of_the_page_are_valid() -> None:
    import tomllib

    page = make_reward_docs.PAGE.read_text(encoding="utf-8")
    block = page.split("```toml\n")[1].split("```")[0]
    tables = tomllib.loads(block)
    assert RewardMix(tables["reward"]["terms"]).labels == ["technical", "motion"]
    assert RewardMix(tables["eval"]["terms"]).labels == ["naturalness"]
