"""Set up and run Flash-GRPO from a fresh clone, with the standard library only.

    python dev.py demo [arguments of `flashgrpo demo`]
    python dev.py test [arguments of pytest]

`demo` trains the embedded tiny Wan on the CPU and writes a report. `test` checks the code and runs
every test; with arguments it runs only pytest, for example `python dev.py test tests/unit -k sde`.

Both use the environment `.venv` in this folder. It is made once and reused until pyproject.toml,
requirements.txt, the Python version or --torch changes.

    --torch SPEC   what to install instead of the tested torch, for example
                   --torch "torch==2.8.0 torchvision==0.23.0"
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MINIMUM_PYTHON = (3, 11)
# One build family: a torchvision of another build than torch breaks every library that imports it.
TORCH = "torch==2.14.1 torchvision==0.29.1"

REPO = Path(__file__).resolve().parent
VENV = REPO / ".venv"
STAMP = VENV / "flashgrpo-setup.json"
WINDOWS = os.name == "nt"
PYTHON = VENV / ("Scripts/python.exe" if WINDOWS else "bin/python")


class StepFailed(Exception):
    """A step ended with an error; carries the exit status for the shell."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def main(arguments: list[str]) -> int:
    """Run one command line and return the exit status."""
    try:
        command, torch, rest = parse(arguments)
    except ValueError as error:
        print(f"dev.py: {error}\n\n{__doc__}", file=sys.stderr)
        return 2
    if command == "help":
        print(__doc__)
        return 0
    if sys.version_info < MINIMUM_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"dev.py: this is Python {found}; run it with 3.11 or newer", file=sys.stderr)
        return 2
    try:
        prepare(command, torch)
        (demo if command == "demo" else test)(rest)
    except StepFailed as failure:
        print(f"\ndev.py: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        print("\ndev.py: stopped", file=sys.stderr)
        return 130
    return 0


def parse(arguments: list[str]) -> tuple[str, str, list[str]]:
    """Split a command line into (command, torch specification, arguments to pass on)."""
    torch, rest = TORCH, []
    words = iter(arguments)
    for word in words:
        if word == "--torch":
            torch = next(words, "")
        elif word.startswith("--torch="):
            torch = word.partition("=")[2]
        else:
            rest.append(word)
    if not torch.strip():
        raise ValueError('--torch needs a value, for example "torch==2.8.0 torchvision==0.23.0"')
    if not rest or rest[0] in ("-h", "--help", "help"):
        return "help", torch, []
    if rest[0] not in ("demo", "test"):
        raise ValueError(f"unknown command {rest[0]!r}: use demo or test")
    return rest[0], torch, rest[1:]


# --- commands ------------------------------------------------------------------------------------


def demo(arguments: list[str]) -> None:
    """Run `flashgrpo demo` in the caller's folder, so that relative paths mean what they say."""
    run("demo", [PYTHON, "-m", "flashgrpo_core", "demo", *arguments])


def test(arguments: list[str]) -> None:
    """Run the checks and all tests, or only pytest when there are arguments."""
    if arguments:
        print("dev.py: arguments given, so only pytest runs", flush=True)
    else:
        run("lint", [PYTHON, "-m", "ruff", "check", "."], folder=REPO)
        run("format", [PYTHON, "-m", "ruff", "format", "--check", "."], folder=REPO)
        run("types", [PYTHON, "-m", "mypy"], folder=REPO)
    run("tests", [PYTHON, "-m", "pytest", *(arguments or parallel())], folder=REPO)


def parallel() -> list[str]:
    """Options of pytest that spread the whole suite over the processors, file by file."""
    processors = os.cpu_count() or 1
    jobs = max(1, min(4, processors))
    # Tests start programs of their own; together they should not ask for more than there is.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processors // jobs)))
    return ["-n", str(jobs), "--dist", "loadfile"]


# --- environment ---------------------------------------------------------------------------------


def prepare(command: str, torch: str) -> None:
    """Make `.venv` ready for `command`; returns at once when it already is."""
    wanted = fingerprint(torch)
    stamp = read_stamp()
    usable = environment_version() == ".".join(map(str, sys.version_info[:3]))
    if usable and stamp.get("fingerprint") == wanted and command in stamp.get("ready", []):
        return
    started = time.monotonic()
    if not usable:
        create_environment()
    STAMP.unlink(missing_ok=True)
    target = f"{REPO}[test]" if command == "test" else str(REPO)
    # Compiling every module takes a large part of the time; most are never imported.
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    run("install", [*pip, *torch.split(), "--editable", target])
    # The test environment holds everything that the demo needs; a demo keeps the test tools that
    # an earlier `test` with the same fingerprint installed.
    ready = {"demo", command}
    if stamp.get("fingerprint") == wanted:
        ready |= set(stamp.get("ready", []))
    record = {"fingerprint": wanted, "ready": sorted(ready)}
    STAMP.write_text(json.dumps(record), encoding="utf-8")
    print(f"dev.py: environment ready after {time.monotonic() - started:.0f} s", flush=True)


def create_environment() -> None:
    """Make an empty `.venv`, replacing one of another Python version."""
    if VENV.exists():
        print(f"dev.py: {VENV} is of another or a broken Python; making it anew", flush=True)
        shutil.rmtree(VENV)
    run("environment", [Path(sys.executable), "-m", "venv", str(VENV)])


def environment_version() -> str:
    """Return the Python version of `.venv`, or an empty text when there is none that works."""
    try:
        lines = (VENV / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    settings = {name.strip(): value.strip() for name, _, value in (x.partition("=") for x in lines)}
    found = settings.get("version") or settings.get("version_info", "")
    return ".".join(found.split(".")[:3]) if PYTHON.exists() else ""


def fingerprint(torch: str) -> str:
    """Hash of everything that decides what has to be installed."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "requirements.txt"):
        digest.update((REPO / name).read_bytes().replace(b"\r\n", b"\n") + b"\0")
    digest.update(f"{sys.version}\0{torch}\0{REPO}".encode())
    return digest.hexdigest()


def read_stamp() -> dict[str, Any]:
    """Return what the last complete set-up wrote; empty when there was none."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and PYTHON.exists() else {}


# --- steps ---------------------------------------------------------------------------------------


def run(step: str, command: list[str | Path], folder: Path | None = None) -> None:
    """Run one step and show what it prints.

    Raises:
        StepFailed: with the step's name, its exit status and the command that repeats it.
    """
    words = [str(word) for word in command]
    print(f"dev.py: {step}: {shown(words)}", flush=True)
    try:
        process = subprocess.Popen(words, cwd=folder)
    except OSError as error:
        message = f"step '{step}' could not start: {error}\n{again(words, folder)}"
        raise StepFailed(message, 1) from None
    stopped = False
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:
            # The child got Ctrl-C as well: it saves its work and ends by itself.
            stopped = True
    if stopped:
        raise KeyboardInterrupt
    if status:
        # A process that a signal ended has a negative status here and 128 + signal in a shell.
        code = 128 - status if status < 0 else status
        message = f"step '{step}' failed with exit status {code}\n{again(words, folder)}"
        raise StepFailed(message, code)


def again(words: list[str], folder: Path | None) -> str:
    """Return the lines that tell how to repeat a step."""
    place = "" if folder is None else f"cd {shown([str(folder)])} && "
    return f"to repeat only this step:\n  {place}{shown(words)}"


def shown(words: list[str]) -> str:
    """Return a command as it is typed in a shell."""
    return subprocess.list2cmdline(words) if WINDOWS else shlex.join(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
