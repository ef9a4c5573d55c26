"""`kill -9` at a few random moments; `tests/soak/kill_matrix.py` is the long version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="forks, and reads /proc")
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "tests" / "soak" / "kill_matrix.py"), "--each", "1"]
    command += ["--points", "backward", "write", "rename", "--seed", "11"]
    command += ["--scratch", str(tmp_path / "runs"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert [c["point"] for c in found["cases"]] == ["backward", "write", "rename"]
    assert found["summary"]["equal"] == 3 and found["summary"]["temporary_files_left"] == 0
    # The last checkpoint's files and the LoRA.
    assert len(found["summary"]["files_compared"]) >= 5
