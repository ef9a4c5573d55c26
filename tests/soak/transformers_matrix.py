"""The tests of the reward models under other versions of transformers: a fresh environment each.

    python tests/soak/transformers_matrix.py [VERSION ...]

Default: the oldest supported version and the last of the fourth series. Writes the figures to
tests/soak/results/transformers_matrix.json. The environments see the packages of the calling one;
only transformers and what it pins are installed anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TESTS = ["tests/unit/test_rewards_clip.py", "tests/unit/test_rewards_qwen.py"]
#: Versions, each with the tokenizers that it asks for.
VERSIONS = {"4.50.3": "tokenizers>=0.21,<0.22", "4.57.6": "tokenizers>=0.22,<0.23"}
RESULT = Path(__file__).with_name("results") / "transformers_matrix.json"


def run(version: str) -> dict[str, object]:
    """Install one version and run the tests; returns the figures."""
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        tokenizers = VERSIONS.get(version, "tokenizers")
        hub = "huggingface_hub<1" if version.startswith("4.") else "huggingface_hub"
        needed = [f"transformers=={version}", tokenizers, hub]
        subprocess.run([*pip, "--target", str(packages), "--no-deps", *needed], check=True)
        # Before everything else on the path, in front of the environment's own transformers.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=REPO,
            env={**_environment(), "PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
        told = subprocess.run(
            [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
            env={**_environment(), "PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            check=True,
        )
    print(done.stdout[-3000:])
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    return {
        "transformers": told.stdout.strip(),
        "status": done.returncode,
        **counts,
        "seconds": round(seconds),
    }


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def main() -> int:
    results = [run(version) for version in sys.argv[1:] or list(VERSIONS)]
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    return 0 if all(r["status"] == 0 and r.get("passed") for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
