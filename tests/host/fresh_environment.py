"""Install `requirements.txt` as ComfyUI's installers do, beside a given version of transformers.

ComfyUI-Manager and comfy-cli install a pack's requirements line by line into the environment that
ComfyUI already runs in. Each line may move a package that an earlier one, or ComfyUI, relies on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
#: What ComfyUI has already and no line may replace. Shown to the new environment, not copied: a
#: download of torch would take longer than everything else.
PRESENT = ("torch", "torchvision", "numpy", "pillow")

# What ComfyUI and the pack take from these libraries when they start.
_USE = """
import json, torch, transformers, diffusers, accelerate, peft
from transformers import CLIPTokenizer, T5TokenizerFast, Qwen2Tokenizer, LlamaTokenizerFast
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from importlib.metadata import version
names = ["torch", "transformers", "huggingface_hub", "tokenizers", "diffusers", "accelerate", "peft"]
print(json.dumps({name: version(name) for name in names}))
"""


@dataclass(frozen=True)
class Outcome:
    """What the environment is like after the last line.

    Attributes:
        problems: broken imports, broken requirements and replaced packages; empty when all is well.
        versions: the last line that the import check printed, versions as JSON.
        seconds: of the whole installation.
    """

    problems: list[str]
    versions: str
    seconds: float


def install_line_by_line(folder: Path, transformers: str) -> Outcome:
    """Make an environment with transformers, then install the pack's requirements one by one.

    Args:
        folder: where to put it.
        transformers: a version specifier, such as `==4.57.*`.
    """
    started = time.monotonic()
    python, own = _environment(folder)
    problems = []
    for line in (f"transformers{transformers}", *requirement_lines()):
        done = _pip(python, "install", "--no-compile", line)
        if done.returncode:
            problems.append(f"{line}: {done.stderr.strip()[-500:]}")
    for name in PRESENT:
        if list(own.glob(f"{name}-*.dist-info")):
            problems.append(f"{name} was installed again")
    used = subprocess.run([str(python), "-c", _USE], capture_output=True, text=True, check=False)
    if used.returncode:
        problems.append(used.stderr.strip().splitlines()[-1])
    checked = _pip(python, "check")
    if checked.returncode:
        problems += checked.stdout.splitlines()
    versions = used.stdout.strip().rpartition("\n")[2]
    return Outcome(problems, versions, time.monotonic() - started)


def replaced_packages(folder: Path, transformers: str, lines: list[str]) -> list[str]:
    """What each line alone would replace beside transformers; nothing of it is installed.

    Args:
        folder: where to put the environment.
        transformers: a version specifier, such as `==4.57.*`.
        lines: requirements, looked at one by one.

    Returns:
        `line: package installed -> wanted` for every package that is there in another version.
    """
    python, own = _environment(folder)
    done = _pip(python, "install", "--no-compile", f"transformers{transformers}")
    assert done.returncode == 0, done.stderr
    paths = [str(own), str(folder / "present")]
    there = {
        canonicalize_name(found.metadata["Name"]): found.version
        for found in importlib.metadata.distributions(path=paths)
    }
    replaced = []
    for line in lines:
        done = _pip(python, "install", "--dry-run", "--report", "-", line)
        assert done.returncode == 0, done.stderr
        for item in json.loads(done.stdout)["install"]:
            name, wanted = item["metadata"]["name"], item["metadata"]["version"]
            installed = there.get(canonicalize_name(name))
            if installed is not None:
                replaced.append(f"{line}: {name} {installed} -> {wanted}")
    return replaced


def requirement_lines() -> list[str]:
    """The pack's requirements."""
    return (REPO / "requirements.txt").read_text(encoding="utf-8").splitlines()


def _environment(folder: Path) -> tuple[Path, Path]:
    """Make an environment in which only `PRESENT` is there; return its Python and own packages."""
    environment = folder / "environment"
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    own = Path(_run([str(python), "-c", "import site; print(site.getsitepackages()[-1])"]).strip())
    (own / "present.pth").write_text(f"{_links(folder / 'present')}\n", encoding="utf-8")
    return python, own


def _pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--quiet"]
    command += ["--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _links(folder: Path) -> Path:
    """Make a folder that shows `PRESENT` and what they need, and nothing else."""
    folder.mkdir(parents=True)
    waiting, seen = list(PRESENT), set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        for line in found.requires or ():
            requirement = Requirement(line)
            wanted = [{"extra": extra} for extra in requirement.extras] or [{"extra": ""}]
            if requirement.marker is None or any(requirement.marker.evaluate(x) for x in wanted):
                waiting.append(requirement.name)
        tops = {file.parts[0] for file in found.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
