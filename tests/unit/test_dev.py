"""`dev.py`: one environment, made once, and failures that say how to repeat the step."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def dev() -> ModuleType:
    """A fresh copy of the module `dev.py`."""
    spec = importlib.util.spec_from_file_location("dev_under_test", REPO / "dev.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Steps:
    """Stands in for `dev.run`: records steps and makes the environment that `venv` would make."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.names: list[str] = []
        self.commands: list[list[str]] = []
        self.fail = ""

    def __call__(self, step: str, command: list[Any], folder: Path | None = None) -> None:
        self.names.append(step)
        self.commands.append([str(word) for word in command])
        if step == self.fail:
            raise self.module.StepFailed("broken", 7)
        if step == "environment":
            self.module.PYTHON.parent.mkdir(parents=True)
            self.module.PYTHON.touch()
            version = ".".join(map(str, sys.version_info[:3]))
            (self.module.VENV / "pyvenv.cfg").write_text(f"home = x\nversion = {version}\n")


@pytest.fixture
def steps(dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """`dev` in an empty clone, with recorded instead of executed steps."""
    for name in ("pyproject.toml", "requirements.txt"):
        (tmp_path / name).write_text("one\n")
    venv = tmp_path / ".venv"
    for name, value in (
        ("REPO", tmp_path),
        ("VENV", venv),
        ("STAMP", venv / "stamp.json"),
        ("PYTHON", venv / "bin" / "python"),
    ):
        monkeypatch.setattr(dev, name, value)
    recorded = Steps(dev)
    monkeypatch.setattr(dev, "run", recorded)
    return recorded


def test_only_the_standard_library_is_imported() -> None:
    tree = ast.parse((REPO / "dev.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        else:
            continue
        for name in names:
            assert name.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["demo"], ("demo", None, [])),
        (["demo", "--out", "X"], ("demo", None, ["--out", "X"])),
        (["test", "tests/unit", "-k", "sde"], ("test", None, ["tests/unit", "-k", "sde"])),
        (["--torch", "torch==2.8.0", "test", "-x"], ("test", "torch==2.8.0", ["-x"])),
        (["test", "--torch=torch==2.8.0", "-x"], ("test", "torch==2.8.0", ["-x"])),
        (["demo", "--help"], ("demo", None, ["--help"])),
        (["--help"], ("help", None, [])),
        ([], ("help", None, [])),
    ],
)
def test_command_lines(dev: ModuleType, words: list[str], expected: tuple) -> None:
    command, torch, rest = expected
    assert dev.parse(words) == (command, torch or dev.TORCH, rest)


@pytest.mark.parametrize("words", [["train"], ["test", "--torch"], ["test", "--torch="]])
def test_wrong_command_lines_end_with_2(dev: ModuleType, words: list[str], capsys: Any) -> None:
    assert dev.main(words) == 2
    assert "dev.py:" in capsys.readouterr().err


def test_torch_and_torchvision_are_of_one_family(dev: ModuleType) -> None:
    """torchvision 0.N+15 is built for torch 2.N, with the same patch number."""
    pins = dict(word.split("==") for word in dev.TORCH.split())
    major, minor, patch = map(int, pins["torch"].split("."))
    assert pins["torchvision"] == f"0.{minor + 15}.{patch}"
    assert major == 2


def test_demo_sets_up_once_and_passes_arguments_on(dev: ModuleType, steps: Steps) -> None:
    assert dev.main(["demo", "--out", "X"]) == 0
    assert steps.names == ["environment", "install", "demo"]
    install = steps.commands[1]
    assert install[-2:] == ["--editable", str(dev.REPO)]
    assert [word for word in install if word.startswith("torch")] == dev.TORCH.split()
    assert steps.commands[2] == [str(dev.PYTHON), "-m", "flashgrpo_core", "demo", "--out", "X"]
    assert dev.main(["demo"]) == 0
    assert steps.names[3:] == ["demo"]


def test_a_test_run_checks_then_tests(dev: ModuleType, steps: Steps) -> None:
    assert dev.main(["test"]) == 0
    assert steps.names == ["environment", "install", "lint", "format", "types", "tests"]
    assert steps.commands[5][3:5] == ["-n", str(max(1, min(4, os.cpu_count() or 1)))]
    assert steps.commands[1][-1] == f"{dev.REPO}[test]"
    assert dev.main(["test", "tests/unit", "-k", "sde"]) == 0
    assert steps.names[6:] == ["tests"]
    assert steps.commands[6][3:] == ["tests/unit", "-k", "sde"]


def test_demo_and_test_share_the_environment(dev: ModuleType, steps: Steps) -> None:
    dev.main(["demo"])
    dev.main(["test", "-x"])
    dev.main(["demo"])
    dev.main(["test", "-x"])
    expected = ["environment", "install", "demo", "install", "tests", "demo", "tests"]
    assert steps.names == expected


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.txt"])
def test_a_changed_file_installs_again(dev: ModuleType, steps: Steps, name: str) -> None:
    dev.main(["demo"])
    (dev.REPO / name).write_text("two\n")
    dev.main(["demo"])
    assert steps.names == ["environment", "install", "demo", "install", "demo"]


def test_another_torch_installs_again(dev: ModuleType, steps: Steps) -> None:
    dev.main(["demo"])
    dev.main(["demo", "--torch", "torch==2.8.0 torchvision==0.23.0"])
    assert steps.names == ["environment", "install", "demo", "install", "demo"]
    assert "torch==2.8.0" in steps.commands[3] and "torchvision==0.23.0" in steps.commands[3]


def test_another_python_makes_the_environment_anew(dev: ModuleType, steps: Steps) -> None:
    dev.main(["demo"])
    old = dev.VENV / "old"
    old.touch()
    (dev.VENV / "pyvenv.cfg").write_text("version = 3.9.1\n")
    dev.main(["demo"])
    assert steps.names == ["environment", "install", "demo"] * 2
    assert not old.exists()


def test_a_failed_install_is_tried_again(dev: ModuleType, steps: Steps, capsys: Any) -> None:
    steps.fail = "install"
    assert dev.main(["demo"]) == 7
    assert "broken" in capsys.readouterr().err
    steps.fail = ""
    assert dev.main(["demo"]) == 0
    assert steps.names == ["environment", "install", "install", "demo"]


def test_a_failing_check_stops_there_with_its_status(dev: ModuleType, steps: Steps) -> None:
    steps.fail = "types"
    assert dev.main(["test"]) == 7
    assert steps.names[-1] == "types"


def test_a_failed_step_names_itself_and_the_command(dev: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    with pytest.raises(dev.StepFailed) as failure:
        dev.run("lint", [sys.executable, "-c", "raise SystemExit(3)"], folder=folder)
    assert failure.value.status == 3
    text = str(failure.value)
    assert "step 'lint' failed with exit status 3" in text
    assert dev.shown([str(folder)]) in text
    repeated = text.splitlines()[-1].strip()
    if os.name != "nt":
        assert subprocess.run(["bash", "-c", repeated], check=False).returncode == 3


def test_a_step_that_cannot_start_says_so(dev: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(dev.StepFailed, match="step 'tests' could not start") as failure:
        dev.run("tests", [tmp_path / "missing"])
    assert failure.value.status != 0


def test_ctrl_c_lets_the_step_finish(tmp_path: Path) -> None:
    """The demo saves a checkpoint on Ctrl-C; `dev.py` must wait for that and then end with 130."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        "    time.sleep(1.0)\n"
        f"    open({str(tmp_path / 'saved')!r}, 'w').close()\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "time.sleep(60)\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"import sys\nsys.path.insert(0, {str(REPO)!r})\nimport dev\n"
        "dev.prepare = lambda command, torch: None\n"
        f"dev.demo = lambda rest: dev.run('demo', [sys.executable, {str(child)!r}])\n"
        "sys.exit(dev.main(['demo']))\n"
    )
    process = subprocess.Popen([sys.executable, str(parent)], start_new_session=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert (tmp_path / "saved").exists()
