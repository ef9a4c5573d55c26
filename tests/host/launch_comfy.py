"""Start ComfyUI's `main.py` in the circumstances a user has.

Usage: python launch_comfy.py COMFY_TREE [ComfyUI arguments]

In the test environment `flashgrpo_core` is installed as a package; a user of the node pack only
has the folder in `custom_nodes`. A node that imports the installed package by its absolute name
would work here and fail there, so the name is blocked.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path


def end_with_parent() -> None:
    """End this process when the test process dies without ending it."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    tree = Path(sys.argv[1])
    program = str(tree / "main.py")
    sys.modules["flashgrpo_core"] = None  # type: ignore[assignment]  # import raises ImportError
    sys.path[0] = str(tree)
    sys.argv = [program, *sys.argv[2:]]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
