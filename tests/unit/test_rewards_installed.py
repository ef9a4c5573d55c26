"""A reward of the user's own: a really installed package, found by its entry point.

The package is the example of docs/rewards.md, copied from there word by word.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashgrpo_core.rewards import installed

REPO = Path(__file__).resolve().parents[2]

#: A group-wise reward, a class without `score`, another name, and a module that fails.
MORE = '''
import numpy as np

class Odd:
    """How far the first pixel is from the group's mean."""
    name = "odd"
    feature_size = 1
    def features(self, batch):
        return batch.videos[:, 0, 0, 0, :1].astype(float)
    def compare(self, features):
        return abs(features[:, 0] - features[:, 0].mean())

class Empty:
    name = "empty"

class Other:
    name = "other"
    def score(self, batch): ...
'''

PROBE = """
import json, sys
import numpy as np
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.rewards import RewardMix, VideoBatch
from flashgrpo_core.rewards.installed import installed_rewards

levels = [0, 51, 255]
videos = np.stack([np.full((2, 4, 4, 3), v, np.uint8) for v in levels])
videos[..., 1:] = 0
batch = VideoBatch(videos, ["a red wall"] * 3, 8.0, ["g"] * 3)
answer = {"names": list(installed_rewards())}
for name, terms in json.loads(sys.argv[1]).items():
    try:
        scores = RewardMix(terms).score(batch)
        answer[name] = {k: v.tolist() for k, v in (scores.terms | {"total": scores.total}).items()}
    except FlashGRPOError as exc:
        answer[name] = str(exc)
print(json.dumps(answer))
"""


def example() -> dict[str, str]:
    """The files of the example in docs/rewards.md, by the name in the line above each block."""
    text = (REPO / "docs" / "rewards.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert set(files) == {"pyproject.toml", "redness.py"}
    return files


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example and a package with more rewards."""
    root = tmp_path_factory.mktemp("packages")
    sources = {"example": example()}
    points = ("odd = 'more:Odd'", "empty = 'more:Empty'", "misnamed = 'more:Other'")
    points += ("broken = 'missing_module:X'", "motion = 'more:Odd'")
    head = "[project]\nname = 'more'\nversion = '2.5'\n[project.entry-points.'flashgrpo.rewards']\n"
    tail = "\n[tool.setuptools]\npy-modules = ['more']\n"
    sources["more"] = {"pyproject.toml": head + "\n".join(points) + tail, "more.py": MORE}
    for name, files in sources.items():
        (root / name).mkdir()
        for file, text in files.items():
            (root / name / file).write_text(text, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    build = ["--no-deps", "--no-build-isolation", "--target", str(root / "site")]
    folders = [str(root / name) for name in sources]
    done = subprocess.run([*pip, *build, *folders], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return root / "site"


def test_installed_rewards_work_and_broken_ones_are_named(target: Path) -> None:
    cases = {
        "alone": [{"name": "redness", "scale": 0.5}],
        "mixed": [{"name": "redness"}, {"name": "redness", "group": "win_rate"}, {"name": "odd"}],
        "ours": [{"name": "motion"}],
        "option": [{"name": "redness", "scael": 1}],
        "near": [{"name": "rednes"}],
        "empty": [{"name": "empty"}],
        "misnamed": [{"name": "misnamed"}],
        "broken": [{"name": "broken"}],
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(REPO)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["names"] == ["broken", "empty", "misnamed", "odd", "redness"]
    assert answer["alone"]["redness"] == pytest.approx([0, 0.1, 0.5])
    assert answer["mixed"]["redness#2.win_rate"] == [0, 0.5, 1]
    assert answer["mixed"]["odd"] == pytest.approx([102, 51, 153])
    assert answer["mixed"]["total"] == pytest.approx([102, 51 + 0.7, 153 + 2])
    assert answer["ours"]["motion"] == [0, 0, 0], "our own name is not taken over"
    assert "did you mean 'scale'" in answer["option"]
    assert "did you mean 'redness'" in answer["near"]
    assert "'empty' of more 2.5 is no class with score(batch)" in answer["empty"]
    assert "has name = 'other'" in answer["misnamed"]
    assert "'broken' of more 2.5 cannot be loaded: No module named" in answer["broken"]


def test_nothing_is_imported_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "x"

        def load(self) -> type:
            raise AssertionError("loaded although only listed")

    monkeypatch.setattr(installed, "entry_points", lambda group: [Entry()])
    assert list(installed.installed_rewards()) == ["x"]
