"""The right to write to a run, checked right before each write.

A worker holds a job by a lease that another one takes over when its heartbeats stop. A worker that
only slept (a stopped process, a suspended machine) wakes up in the middle of whatever it did and
must not write any more. Files cannot be compared and written in one step, so each kind of write is
made safe by its order:

* **append**: open, check, write. Who takes over replaces the log by a copy of itself after the
  lease has changed hands, so a handle from before leads to a file that nobody reads.
* **new file or checkpoint**: write under a temporary name, check, rename. Who takes over removes
  temporary files first, so a rename from before finds nothing. Their names are drawn anew each
  time and never meet those of another process.
* **delete, move aside**: check, act. What is deleted here is what the newest checkpoint has made
  superfluous, and a checkpoint that was moved aside is still found.

Outside of a worker there is no fence, and `check` does nothing.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class LostLease(Exception):
    """Another worker has the job: nothing may be written any more."""


class Released(LostLease):
    """This worker was asked to end and gives its job back: the run neither ends nor fails."""


@dataclass(frozen=True)
class _Fence:
    roots: tuple[str, ...]
    holds: Callable[[], bool]
    name: str


_fence: _Fence | None = None


@contextmanager
def fenced(roots: list[Path], holds: Callable[[], bool], name: str) -> Iterator[None]:
    """Let this process write below `roots` only as long as `holds()` is true.

    Args:
        roots: absolute folders.
        holds: looks the lease up; called before each write.
        name: name of the lease, for the lock file of the run.
    """
    global _fence
    before = _fence
    _fence = _Fence(tuple(str(root) for root in roots), holds, name)
    try:
        yield
    finally:
        _fence = before


def check(path: str | os.PathLike[str]) -> None:
    """Stop a write to `path` that this process has no right to any more.

    Raises:
        LostLease: the lease is gone.
    """
    if _fence is None:
        return
    text = os.fspath(path)
    if any(text == root or text.startswith(root + os.sep) for root in _fence.roots):
        if not _fence.holds():
            raise LostLease(f"another worker has taken over {_fence.name!r}: nothing is written")


def holder() -> str:
    """Name of the lease that this process writes under; empty without one."""
    return "" if _fence is None else _fence.name


def unique() -> str:
    """Digits for a temporary name that no other process draws, on whatever machine."""
    return f"{os.getpid()}{secrets.randbelow(10**12):012d}"
