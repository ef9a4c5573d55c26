"""`flashgrpo bench --quick`: real runs, a report, and going on where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashgrpo_core", "bench", "--quick", "--out", str(folder)]
    return subprocess.run(
        [*command, "--arms", "flash,mixed", "--json", *options],
        capture_output=True,
        text=True,
        cwd=REPO,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("bench runs")
    done = bench(folder, "--jobs", "2", "--learning-rate", "0.001")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_the_report_holds_what_the_runs_did(finished: tuple[Path, dict]) -> None:
    folder, found = finished
    assert {p.name for p in folder.glob("bench.*")} == {"bench.html", "bench.json", "bench.svg"}
    assert json.loads((folder / "bench.json").read_text()) == found
    assert set(found["arms"]) == {"flash", "mixed"}
    for arm, row in found["arms"].items():
        assert row["runs"] == 1 and row["iterations"] >= 2, arm
        assert 0 < row["start"] <= 1 and 0 < row["last"] <= 1
        assert all(seconds > 0 for seconds in row["phases"].values())
    assert found["arms"]["flash"]["explained"] < 1e-9 < found["arms"]["mixed"]["explained"]
    page = (folder / "bench.html").read_text(encoding="utf-8")
    assert "src=" not in page and "http" not in page.replace("http://www.w3.org", "")
    # Runs are removed once they are measured.
    assert not list((folder / "work").glob("*/flashgrpo/runs/*/checkpoints"))


def test_only_what_is_missing_runs_again(finished: tuple[Path, dict]) -> None:
    folder, found = finished
    kept, lost = sorted((folder / "cells").glob("*.json"))
    before, saved = kept.stat().st_mtime_ns, json.loads(lost.read_text())
    lost.unlink()
    again = bench(folder, "--learning-rate", "0.001")
    assert again.returncode == 0, again.stderr
    assert kept.stat().st_mtime_ns == before
    # One thread and fixed seeds: the run repeats itself, but for its times.
    curve = json.loads(lost.read_text())["curve"]
    assert [p["reward"] for p in curve] == [p["reward"] for p in saved["curve"]]
    drawn = bench(folder, "--learning-rate", "0.001", "--report-only")
    assert drawn.returncode == 0
    assert json.loads(drawn.stdout)["arms"]["mixed"]["last"] == found["arms"]["mixed"]["last"]


def test_a_run_that_collapses_is_counted_not_fatal(tmp_path: Path) -> None:
    """A learning rate of 1 leaves nothing of the videos; the report says so."""
    done = bench(tmp_path, "--arms", "flash", "--learning-rate", "1.0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["arms"]["flash"]["collapsed"] == 1
    assert "Collapsed runs: Flash, shared noise (1)" in (tmp_path / "bench.html").read_text()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    wrong = bench(tmp_path, "--report-only")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].startswith("flashgrpo: no run is finished in")
    unknown = bench(tmp_path, "--arms", "flash,best")
    assert unknown.returncode == 2 and "'best'" in unknown.stderr
