"""The GPU check at toy sizes on the CPU: every part runs, and a wrong number is a failed row."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def test_every_part_runs_and_the_table_comes_last(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--cpu-dry-run", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("part") and len(lines) == 1 + len(rows)
    assert {row["part"] for row in rows} == {"host", "small", "1.3B", "14B"}
    assert {row["result"] for row in rows} <= {"ok", "no torchao"}
    timed = [row for row in rows if row["seconds"] is not None]
    for part in ("1.3B", "14B"):
        for phase in ("rollout", "decode", "update"):
            assert any(r["part"] == part and r["what"].startswith(phase) for r in timed)
    compared = [row for row in rows if row["limit"] is not None]
    assert len(compared) >= 20
    # The savings change no gradient; a forward and a backward of another batch size round apart.
    for row in rows:
        if row["what"].startswith("update") and row["value"] is not None:
            assert row["value"] <= 2e-2, row


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check_test"] = check
    spec.loader.exec_module(check)
    return check


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert module().main([]) == 0
    assert "no CUDA GPU" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--wheels", "--json"])
def test_folders_are_checked_before_anything_runs(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    path = missing / "rows.json" if option == "--json" else missing
    with pytest.raises(SystemExit) as caught:
        module().main(["--cpu-dry-run", option, str(path)])
    assert caught.value.code == 2
    assert f"{option} {path}: there is no" in capsys.readouterr().err.splitlines()[-1]


def test_the_default_ends_within_eight_minutes() -> None:
    check = module()
    assert check.arguments([]).seconds + check.GRACE <= 480 - 30  # a start of half a minute


def test_rows_beyond_their_limit_fail() -> None:
    check = module()
    table = check.Table(60)
    for value, result in ((0.5, "ok"), (2.0, "FAILED"), (float("nan"), "FAILED")):
        table.add(check.Row("small", "number", value=value, limit=1.0))
        assert table.rows[-1].result == result
    with pytest.raises(check.OutOfTime):
        check.Table(-1).check()
