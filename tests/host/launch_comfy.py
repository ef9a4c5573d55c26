"""Start ComfyUI's `main.py` in the circumstances a user has.

Usage: python launch_comfy.py COMFY_TREE [ComfyUI arguments]

In the test environment `flashgrpo_core` is installed as a package; a user of the node pack only
has the folder in `custom_nodes`. A node that imports the installed package by its absolute name
would work here and fail there, so the name is blocked.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    tree = Path(sys.argv[1])
    program = str(tree / "main.py")
    sys.modules["flashgrpo_core"] = None  # type: ignore[assignment]  # import raises ImportError
    sys.path[0] = str(tree)
    sys.argv = [program, *sys.argv[2:]]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
