"""Every workflow in both frontends and both renderers, in a real browser, with Run pressed.

    python tests/soak/browser_matrix.py

Runs the browser tests with the `matrix` ones, which the ordinary test run leaves out, and writes
`benchmarks/results/browser_matrix.json`. Takes about ten minutes on two free cores. The screenshots,
before and after running, are in `.cache/screenshots`: look at them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "host"))

from fetch import COMFY_VERSION, FRONTEND_NEW, FRONTEND_OLD  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "browser_matrix.json"


def main() -> int:
    """Run the matrix and return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/browser", "-m", "matrix or not matrix"]
        status = subprocess.run(
            [*command, "-v", "--junitxml", str(report)], cwd=ROOT, check=False
        ).returncode
        # Written by the test run above.
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314
    rows = [
        {
            "test": case.get("name"),
            "result": next((child.tag for child in case if child.tag != "system-out"), "passed"),
            "seconds": round(float(case.get("time", "0"))),
        }
        for case in cases
    ]
    result = {
        "comfyui": COMFY_VERSION,
        "frontends": {"old": FRONTEND_OLD, "new": FRONTEND_NEW},
        "passed": sum(row["result"] == "passed" for row in rows),
        "tests": rows,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{result['passed']} of {len(rows)} passed, written to {RESULTS.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
