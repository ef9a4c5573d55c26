"""The 8-bit AdamW with its real package, which the test environment does without.

Inside the environment it would change what other libraries find there, so it goes into a folder of
its own and the tests run in a process that sees it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_with_the_package_installed(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--target", str(tmp_path), "torchao>=0.15"], check=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/unit/test_adam8bit.py",
        ],
        capture_output=True,
        text=True,
        cwd=REPO,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        | {"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout
