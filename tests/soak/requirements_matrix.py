"""Install the pack's requirements beside several versions of transformers, as users do.

    python tests/soak/requirements_matrix.py

For each version: a new environment with ComfyUI's torch, that transformers, then every line of
`requirements.txt` on its own; afterwards torch is still the same, no requirement is broken, and
what ComfyUI and the pack use can be imported. Takes about two minutes per version and needs the
package index. Writes `benchmarks/results/requirements_matrix.json`; exits with 1 on any problem.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "host"))

from fresh_environment import install_line_by_line  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "requirements_matrix.json"
#: The first 4.57, the last 4.x, the first 5.x, the newest.
VERSIONS = ("==4.57.0", "==4.57.*", "==5.0.*", ">=5")


def main() -> int:
    """Run the matrix."""
    rows = []
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            outcome = install_line_by_line(Path(folder), version)
        rows.append(
            {
                "transformers": version,
                "problems": outcome.problems,
                "versions": json.loads(outcome.versions or "{}"),
                "seconds": round(outcome.seconds),
            }
        )
        print(
            f"transformers{version}: {outcome.problems or 'fine'}, {outcome.versions}", flush=True
        )
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
