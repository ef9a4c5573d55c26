"""Checkpoints: folders of safetensors and one JSON manifest, written so that no crash can hurt.

A checkpoint comes into being with one rename, so it is either complete or absent. Replacing one of
the same iteration moves the old one aside first; `newest_checkpoint` still finds it there when the
process dies between the two renames, and `clean_temporary` moves it back. Deleting renames first
too, so that a half-deleted folder is never taken for a damaged checkpoint. The bytes depend on the
tensors and the state only: no times, no process ids, sorted keys.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from .. import fence
from ..errors import FlashGRPOError
from ..files import save_tensors

log = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
FORMAT = 1
WINDOWS = os.name == "nt"

_NAME = re.compile(r"\d{6,}")
_ASIDE = re.compile(r"\.old-(\d+)-\d+")
_TEMPORARY = re.compile(r"\.(?:tmp|trash)-\d+-\d+")
_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

Tensors = dict[str, dict[str, torch.Tensor]]


def checkpoint_name(iteration: int) -> str:
    """Folder name of the checkpoint after `iteration`."""
    return f"{iteration:06d}"


def save_checkpoint(
    folder: str | Path, iteration: int, tensors: Tensors, state: dict[str, Any]
) -> Path:
    """Write the checkpoint of `iteration`; it appears complete or not at all.

    Args:
        folder: the run's `checkpoints` folder.
        iteration: iterations finished so far.
        tensors: file stem (adapter, ema, optimizer, ...) to named tensors.
        state: counters and random-number state; plain JSON, finite numbers only.

    Returns:
        The checkpoint's folder.

    Raises:
        FlashGRPOError: the disk is full, the folder cannot be written or `state` is not JSON; the
            checkpoints that existed before are untouched.
    """
    folder = Path(folder)
    target = folder / checkpoint_name(iteration)
    temporary = folder / f".tmp-{iteration}-{fence.unique()}"
    aside = folder / f".old-{iteration}-{fence.unique()}"
    for stem in tensors:
        if not _STEM.fullmatch(stem):
            raise FlashGRPOError(
                f"checkpoint file stem {stem!r} is not usable: letters, digits, '-', '_' only"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fence.check(folder)
        os.mkdir(temporary)
        files = {}
        for stem in sorted(tensors):
            path = temporary / f"{stem}.safetensors"
            digest = save_tensors(path, tensors[stem], None)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
        manifest = {"files": files, "format": FORMAT, "iteration": iteration, "state": state}
        _write_synced(temporary / MANIFEST, signed(manifest))
        sync_folder(temporary)
        if target.exists():
            _rename(target, aside)
        _rename(temporary, target)
        sync_folder(folder)
        if aside.exists():
            _remove(aside)
    except OSError as exc:
        raise _write_error(target, exc) from exc
    finally:
        # Only a failure leaves these: after success both are gone.
        if aside.exists() and not target.exists():
            os.rename(aside, target)
        if temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def load_checkpoint(path: str | Path) -> tuple[Tensors, dict[str, Any]]:
    """Read a checkpoint and verify every file against its SHA-256.

    Returns:
        (file stem -> named tensors on the CPU, state).

    Raises:
        FlashGRPOError: something is missing, damaged, or written by a newer version.
    """
    path = Path(path)
    manifest = read_manifest(path)
    tensors: Tensors = {}
    for name, entry in manifest["files"].items():
        stem = name.removesuffix(".safetensors")
        if stem == name or not _STEM.fullmatch(stem):
            raise _damaged(path, f"{name!r} is no checkpoint file name")
        try:
            data = (path / name).read_bytes()
        except OSError as exc:
            raise _damaged(path, f"{name} cannot be read ({exc.strerror or exc})") from exc
        if hashlib.sha256(data).hexdigest() != entry.get("sha256"):
            raise _damaged(path, f"{name} does not match its SHA-256")
        try:
            tensors[stem] = load_safetensors(data)
        except (SafetensorError, ValueError) as exc:
            raise _damaged(path, f"{name} is not safetensors ({exc})") from exc
    return tensors, manifest["state"]


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest (`iteration`, `state`, `files`) without reading any tensor.

    Raises:
        FlashGRPOError: it is missing, damaged, or written by a newer version.
    """
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _damaged(path, f"{MANIFEST} is missing") from None
    except (OSError, ValueError, RecursionError) as exc:
        raise _damaged(path, f"{MANIFEST} cannot be read ({exc})") from exc
    if not isinstance(manifest, dict) or not all(
        isinstance(manifest.get(key), kind)
        for key, kind in (("files", dict), ("state", dict), ("iteration", int))
    ):
        raise _damaged(path, f"{MANIFEST} lacks files, state or iteration")
    if manifest.get("format") != FORMAT:
        raise FlashGRPOError(
            f"checkpoint {str(path)!r} has format {manifest.get('format')!r}, this version reads "
            f"{FORMAT}: update FlashGRPO"
        )
    if manifest.pop("sha256", None) != _manifest_hash(manifest):
        raise _damaged(path, f"{MANIFEST} does not match its own SHA-256")
    return manifest


def list_checkpoints(folder: str | Path) -> dict[int, Path]:
    """Iteration to folder, ascending. Only names are looked at; nothing is verified or changed."""
    found: dict[int, Path] = {}
    try:
        entries = sorted(Path(folder).iterdir())
    except FileNotFoundError:
        return {}
    for entry in entries:
        aside = _ASIDE.fullmatch(entry.name)
        if aside:
            found.setdefault(int(aside[1]), entry)
        elif _NAME.fullmatch(entry.name):
            found[int(entry.name)] = entry
    return dict(sorted(found.items()))


def newest_checkpoint(
    folder: str | Path, on_corrupt: Callable[[Path, str], None] | None = None
) -> Path | None:
    """The newest checkpoint whose every file verifies, or None.

    Args:
        folder: the run's `checkpoints` folder.
        on_corrupt: told (path, reason) for each newer one that had to be passed over; without it
            the reason is logged.
    """
    for path in reversed(list_checkpoints(folder).values()):
        try:
            verify(path)
        except FlashGRPOError as exc:
            if on_corrupt is None:
                log.warning("%s", exc)
            else:
                on_corrupt(path, str(exc))
            continue
        return path
    return None


def verify(path: str | Path) -> None:
    """Check the size and SHA-256 of every file, without building tensors.

    Raises:
        FlashGRPOError: the first thing that is wrong.
    """
    path = Path(path)
    for name, entry in read_manifest(path)["files"].items():
        digest = hashlib.sha256()
        try:
            with open(path / os.path.basename(name), "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as exc:
            raise _damaged(path, f"{name} cannot be read ({exc.strerror or exc})") from exc
        if digest.hexdigest() != entry.get("sha256"):
            raise _damaged(path, f"{name} does not match its SHA-256")


def prune(folder: str | Path, keep: int, best: int | None = None, every: int = 1) -> list[int]:
    """Delete checkpoints that are no longer wanted.

    Kept are the newest one and the one before it (which a resume falls back to when the newest is
    damaged), `best`, and the newest of those at multiples of `every` until `keep` are kept besides
    `best`.

    Args:
        folder: the run's `checkpoints` folder.
        keep: how many to keep besides `best`, at least 1.
        best: iteration of the best evaluation, if there was one.
        every: only multiples of it are worth keeping once they are not the newest.

    Returns:
        The iterations that were deleted.
    """
    found = list_checkpoints(folder)
    wanted = [
        i for i in reversed(found) if i != best and (i == max(found) or i % max(1, every) == 0)
    ]
    kept = {*wanted[: max(1, keep)], best, *sorted(found)[-2:]}
    removed = []
    for iteration, path in found.items():
        if iteration not in kept:
            trash = path.parent / f".trash-{iteration}-{fence.unique()}"
            try:
                _rename(path, trash)
                _remove(trash)
            except OSError as exc:
                # An open file (a virus scanner, an explorer window) must not stop the training.
                log.warning("old checkpoint %s could not be deleted: %s", path, exc)
                continue
            removed.append(iteration)
    return removed


def clean_temporary(folder: str | Path) -> None:
    """Remove what a crash left behind; only the process that trains the run may call it.

    A checkpoint that had been moved aside returns to its place when its successor is missing.
    """
    folder = Path(folder)
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    for entry in entries:
        aside = _ASIDE.fullmatch(entry.name)
        try:
            if aside and not (folder / checkpoint_name(int(aside[1]))).exists():
                _rename(entry, folder / checkpoint_name(int(aside[1])))
                sync_folder(folder)
            elif aside or _TEMPORARY.fullmatch(entry.name):
                _remove(entry)
        except OSError as exc:
            log.warning("left-over %s could not be removed: %s", entry, exc)


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable; Windows has no such call and needs none."""
    if WINDOWS:
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(handle)


def signed(manifest: dict[str, Any]) -> str:
    """The text of a manifest, with the SHA-256 of everything else in it.

    Raises:
        FlashGRPOError: the state is not plain finite JSON.
    """
    return _manifest_text(manifest | {"sha256": _manifest_hash(manifest)})


def _manifest_hash(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(_manifest_text(manifest).encode()).hexdigest()


def _manifest_text(manifest: dict[str, Any]) -> str:
    try:
        return json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as exc:
        raise FlashGRPOError(
            f"checkpoint state is not plain finite JSON ({exc}): store numbers, strings, lists "
            "and tables only"
        ) from exc


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _rename(source: Path, target: Path) -> None:
    """Rename a folder; waits out the short sharing violations of Windows virus scanners."""
    fence.check(target)
    for pause in (0.05, 0.2, 0.8):
        try:
            os.rename(source, target)
            return
        except PermissionError:
            if not WINDOWS:
                raise
            time.sleep(pause)
    os.rename(source, target)


def _remove(path: Path) -> None:
    """Delete a file or folder; waits out sharing violations like `_rename`."""
    fence.check(path)
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for pause in (0.05, 0.2, 0.8):
        try:
            shutil.rmtree(path)
            return
        except PermissionError:
            if not WINDOWS:
                raise
            time.sleep(pause)
    shutil.rmtree(path)


def _write_error(target: Path, exc: OSError) -> FlashGRPOError:
    if exc.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return FlashGRPOError(
            f"no space left to write checkpoint {str(target)!r}: free some and resume; earlier "
            "checkpoints are intact"
        )
    return FlashGRPOError(
        f"checkpoint {str(target)!r} cannot be written: {exc.strerror or exc}; check the folder's "
        "permissions and resume"
    )


def _damaged(path: Path, reason: str) -> FlashGRPOError:
    return FlashGRPOError(
        f"checkpoint {str(path)!r} is damaged: {reason}; resume from an older one or start a new "
        "run"
    )
