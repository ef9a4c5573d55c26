"""What is installed, what is published, and what must never be in either."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import archive
import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]

#: Import name -> what brings it. Modules may import these; everything else needs a guard.
PROVIDED = {
    "accelerate": "accelerate",
    "diffusers": "diffusers",
    "imageio_ffmpeg": "imageio-ffmpeg",
    "numpy": "diffusers",
    "peft": "peft",
    "PIL": "pillow",
    "safetensors": "safetensors",
    "sentencepiece": "sentencepiece",
    "tokenizers": "peft",  # transformers needs it
    "torch": "accelerate",
    "transformers": "peft",
}
#: Extras and optional tools: only where their absence is answered.
OPTIONAL = {"aiohttp", "av", "cv2", "rapidocr", "tensorboard", "torchao", "wandb"}
#: ComfyUI's own modules and what it always brings: for `nodes/` and the entry point.
COMFY = {"aiohttp", "comfy", "comfy_api", "comfy_execution", "folder_paths", "server"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def published() -> list[str]:
    return archive.pack_files(tracked_only=False)


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))


def imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield every import and whether loading the module fails without it."""

    def visit(node: ast.AST, loaded: bool) -> Iterator[tuple[Any, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, loaded
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            guarded = isinstance(child, ast.Try) and "ImportError" in "".join(
                ast.unparse(handler.type) for handler in child.handlers if handler.type
            )
            yield from visit(child, loaded and not inner and not typing_only and not guarded)

    yield from visit(tree, True)


def top_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [] if node.level else [str(node.module).partition(".")[0]]
    return [alias.name.partition(".")[0] for alias in node.names]


# --- installation --------------------------------------------------------------------------------


def test_requirements_equal_the_project_dependencies(project: dict[str, Any]) -> None:
    """ComfyUI's installer reads one, everything else the other."""
    lines = (REPO / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert lines == project["project"]["dependencies"]


def test_requirements_leave_the_users_torch_alone(project: dict[str, Any]) -> None:
    """A pin here replaces a CUDA build by another one, or breaks ComfyUI's own start."""
    for line in project["project"]["dependencies"]:
        requirement = Requirement(line)
        assert requirement.name not in {"torch", "torchvision", "torchaudio", "transformers"}
        assert not any(spec.operator in ("==", "===", "~=") for spec in requirement.specifier)
        if requirement.name in {"numpy", "pillow"}:
            assert not requirement.specifier


def test_diffusers_has_the_upper_bound_that_keeps_comfyui_starting(project: dict[str, Any]) -> None:
    """diffusers 0.40 wants huggingface-hub 2, with which transformers 4.57 cannot be imported."""
    (line,) = (x for x in project["project"]["dependencies"] if x.startswith("diffusers"))
    assert not Requirement(line).specifier.contains("0.40.0")
    assert Requirement(line).specifier.contains("0.39.0")


def test_the_registry_finds_its_fields(project: dict[str, Any]) -> None:
    name = project["project"]["name"]
    assert re.fullmatch(r"[A-Za-z]([-_.]?[A-Za-z0-9])*", name) and "comfyui" not in name.lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["project"]["version"])
    assert project["project"]["urls"]["Repository"].startswith("https://github.com/")
    comfy = project["tool"]["comfy"]
    assert comfy["PublisherId"] and comfy["DisplayName"]
    assert comfy["requires-comfyui"] == ">=0.3.75"
    assert "web" not in comfy, "with WEB_DIRECTORY it would load every script twice"
    licence = (REPO / project["project"]["license"]["file"]).read_text(encoding="utf-8")
    assert "Apache License" in licence and "Version 2.0" in licence


def test_one_version_everywhere(project: dict[str, Any]) -> None:
    version = project["project"]["version"]
    package = (REPO / "flashgrpo_core" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{version}"' in package
    assert re.search(
        rf"^## {re.escape(version)}\b", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )


def test_the_console_script_exists(project: dict[str, Any]) -> None:
    module, _, function = project["project"]["scripts"]["flashgrpo"].partition(":")
    assert hasattr(importlib.import_module(module), function)


def test_the_wheel_holds_the_core_and_its_assets(tmp_path: Path) -> None:
    """`pip install` takes the core only: `nodes` would shadow ComfyUI's module of that name."""
    source = tmp_path / "source"
    archive.install_pack(source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {
        "flashgrpo_core",
        "flashgrpo-0.1.0.dist-info",
    }
    assets = [p for p in (REPO / "flashgrpo_core" / "assets").rglob("*") if p.is_file()]
    assert assets
    assert {path.relative_to(REPO).as_posix() for path in assets} <= names


# --- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["flashgrpo_core", "nodes"])
def test_every_import_is_provided(folder: str) -> None:
    allowed = set(PROVIDED) | (COMFY if folder == "nodes" else set())
    wrong = []
    for path in python_files(folder):
        for node, loaded in imports(ast.parse(path.read_text(encoding="utf-8"))):
            for name in top_names(node):
                known = allowed if loaded else allowed | OPTIONAL
                if name not in known and name not in sys.stdlib_module_names:
                    wrong.append(f"{path.relative_to(REPO)}:{node.lineno}: {name}")
    assert not wrong, "neither a dependency nor guarded: " + ", ".join(wrong)


def test_the_core_knows_neither_comfyui_nor_the_nodes() -> None:
    forbidden = (COMFY | {"nodes", "execution", "latent_preview"}) - {"aiohttp"}
    for path in python_files("flashgrpo_core"):
        for node, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            assert not forbidden & set(top_names(node)), f"{path}:{node.lineno}"


def test_the_pack_imports_itself_relatively() -> None:
    """ComfyUI gives the pack a module name of its own choice; an absolute import misses it."""
    for path in [REPO / "__init__.py", *python_files("nodes", "flashgrpo_core")]:
        for node, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            names = set(top_names(node))
            assert not names & {"flashgrpo_core", "nodes"}, f"{path}:{node.lineno}"


def test_dependencies_are_used(project: dict[str, Any]) -> None:
    used = set()
    for path in python_files("flashgrpo_core", "nodes"):
        for node, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            used |= {PROVIDED[name] for name in top_names(node) if name in PROVIDED}
    wanted = {Requirement(line).name for line in project["project"]["dependencies"]}
    # The last one declares the range of frontends; the browser runs it.
    assert wanted - used == {"comfyui-frontend-package"}


# --- the published archive -----------------------------------------------------------------------


def test_the_archive_holds_what_a_node_pack_needs(published: list[str]) -> None:
    for name in ("__init__.py", "nodes/extension.py", "pyproject.toml", "requirements.txt"):
        assert name in published
    assert "LICENSE" in published
    assert any(name.startswith("flashgrpo_core/assets/tiny_wan/") for name in published)


def test_the_archive_leaves_development_out(published: list[str]) -> None:
    outside = ("tests/", "benchmarks/", "scripts/", "docs/", ".ci/", "dev.py", ".gitignore")
    assert [name for name in published if name.startswith(outside)] == []
    assert [name for name in published if "__pycache__" in name or name.startswith(".")] == []


def test_what_starts_processes_or_reads_the_environment_stays_out(published: list[str]) -> None:
    """Worker and launcher come from the installed package; the nodes only write and read files."""
    for name in ("launch.py", "worker.py", "worker_job.py"):
        assert (REPO / "flashgrpo_core" / name).is_file()
        assert f"flashgrpo_core/{name}" not in published
    for name in ("runs/queue.py", "runs/job.py", "fence.py", "ready_embeddings.py"):
        assert f"flashgrpo_core/{name}" in published


def test_the_archive_says_where_the_worker_comes_from(tmp_path: Path) -> None:
    """Every module of the archive imports without what is left out, and so does its command line."""
    folder = archive.install_pack(tmp_path / "Größe")
    script = (
        "import importlib, pathlib, sys\n"
        # The development environment would offer the modules that the archive lacks.
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import flashgrpo_core\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "assert pathlib.Path(flashgrpo_core.__file__).is_relative_to(root)\n"
        "for path in sorted((root / 'flashgrpo_core').rglob('*.py')):\n"
        "    if path.name != '__main__.py':\n"
        "        name = '.'.join(path.relative_to(root).with_suffix('').parts)\n"
        "        importlib.import_module(name.removesuffix('.__init__'))\n"
        "from flashgrpo_core.cli import main\n"
        "sys.exit(main(['worker', '--runs', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "not part of the ComfyUI node pack" in done.stderr


def test_the_registry_finds_nothing_to_object_to() -> None:
    assert [str(finding) for finding in archive.scan_archive()] == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.py", "os.system(command)"),
        ("a.py", "import subprocess"),
        ("a.py", "value = eval(text)"),
        ("a.py", "exec(code)"),
        ("a.py", "import pickle"),
        ("a.py", 'home = os.environ.get("HOME")'),
        ("a.py", 'home = os.getenv("HOME")'),
        ("a.py", "import requests"),
        ("a.py", "from urllib.request import urlopen"),
        ("a.py", "import socket"),
        ("a.py", "from huggingface_hub import snapshot_download"),
        ("docs.md", "see https://raw.githubusercontent.com/a/b/main/c.png"),
        ("docs.md", "run it with subprocess"),
        ("a.js", "socket.connect(address)"),
        ("a.js", "handler = run.bind(this)"),
        ("a.js", 'fetch("https://example.org/x")'),
        ("a.js", 'import { x } from "https://example.org/x.js"'),
        ("w.json", '{"code": "os.system(1)"}'),
    ],
)
def test_the_scanner_sees(name: str, line: str) -> None:
    assert archive.scan_text(name, f"first\n{line}\n")[0].line == 2


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.py", "model.eval()"),
        ("a.py", "evaluation(policy)"),
        ("a.py", "from aiohttp import web"),
        ("a.js", "pattern.exec(text)"),
        ("a.js", 'import { app } from "../../scripts/app.js"'),
        ("a.js", 'api.fetchApi("/flashgrpo/runs")'),
    ],
)
def test_the_scanner_lets_pass(name: str, line: str) -> None:
    assert archive.scan_text(name, line) == []


def test_every_import_of_the_archive_is_in_the_archive(published: list[str]) -> None:
    """A node must not need a module that only the command line has."""
    present = set(published)
    missing = []
    for name in (n for n in published if n.endswith(".py")):
        package = Path(name).parent
        tree = ast.parse((REPO / name).read_text(encoding="utf-8"))
        answered = {node for block in ast.walk(tree) for node in import_error_block(block)}
        for node, _ in imports(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level or node in answered:
                continue
            base = package
            for _ in range(node.level - 1):
                base = base.parent
            target = base.joinpath(*(node.module or "").split("."))
            candidates = [target] if node.module else [target / a.name for a in node.names]
            for path in candidates:
                file, folder = f"{path.as_posix()}.py", f"{path.as_posix()}/__init__.py"
                if not present & {file, folder} and not _is_name(target, path, present):
                    missing.append(f"{name}:{node.lineno}: {path.as_posix()}")
    assert missing == []


def import_error_block(block: ast.AST) -> list[ast.AST]:
    """What stands in a `try` whose `except ImportError` says what happens without the module."""
    if not isinstance(block, ast.Try):
        return []
    caught = [ast.unparse(handler.type) for handler in block.handlers if handler.type]
    return block.body if "ImportError" in caught else []


def _is_name(package: Path, path: Path, present: set[str]) -> bool:
    """Whether `from . import x` takes a name that the package itself defines."""
    init = (package / "__init__.py").as_posix()
    if path == package or init not in present:
        return False
    return re.search(rf"\b{path.name}\b", (REPO / init).read_text(encoding="utf-8")) is not None


# --- entry point ---------------------------------------------------------------------------------


def test_without_comfyui_the_entry_point_explains_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = archive.install_pack(tmp_path / "Größe nodes" / "flash-grpo.main")
    spec = importlib.util.spec_from_file_location("pack_x_main", folder / "__init__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with caplog.at_level(logging.ERROR):
        spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS == {}
    assert not hasattr(module, "comfy_entrypoint")
    assert "0.3.75" in caplog.text and "Update ComfyUI" in caplog.text


def test_the_entry_point_is_thin() -> None:
    lines = (REPO / "__init__.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 45
