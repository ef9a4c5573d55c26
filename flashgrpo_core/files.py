"""Files on disk: tensors in and out, atomic writing, hashes, safe paths.

Writing sorts everything, because the safetensors library writes its metadata in random order and
equal runs must give equal bytes. Reading is in `tensor_file`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import fence
from .errors import FlashGRPOError
from .tensor_file import DTYPES, TensorFile, open_tensors

__all__ = [
    "TensorFile",
    "open_tensors",
    "path_parts",
    "resolve_inside",
    "save_tensors",
    "sha256_file",
    "write_bytes_atomic",
    "write_tensors",
    "write_text_atomic",
]

MAX_NAME = 1024  # characters of a relative path
MAX_PART = 255  # bytes of one path component, the limit of common file systems
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 22


def write_tensors(
    path: str | os.PathLike[str],
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    produce: Callable[[str], torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> str:
    """Write a safetensors file tensor by tensor, holding one tensor in memory at a time.

    Args:
        path: file to write; its folder is created.
        layout: dtype and shape of every tensor by name.
        produce: gives the tensor of a name; called once per name, in file order.
        metadata: text values of the header.

    Returns:
        SHA-256 of the file, hex.

    Raises:
        FlashGRPOError: the disk is full, a tensor does not match its layout, or the metadata is
            not text. The previous file at `path` is then untouched.
    """
    header, names = _layout_header(layout, metadata)
    digest = hashlib.sha256()
    with _atomic(Path(path)) as handle:
        for chunk in (len(header).to_bytes(8, "little"), header):
            handle.write(chunk)
            digest.update(chunk)
        for name in names:
            tensor = produce(name)
            dtype, shape = layout[name]
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise FlashGRPOError(
                    f"tensor `{name}` is {tensor.dtype} {list(tensor.shape)}, "
                    f"announced as {dtype} {list(shape)}; give both the same layout"
                )
            data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
            handle.write(data)
            digest.update(data)
    return digest.hexdigest()


def save_tensors(
    path: str | os.PathLike[str],
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> str:
    """Write tensors as one safetensors file: equal content gives equal bytes.

    The file appears complete or not at all: it is written under a temporary name in the same
    folder, flushed to the disk and renamed.

    Returns:
        SHA-256 of the file, hex.

    Raises:
        FlashGRPOError: as `write_tensors`.
    """
    layout = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    return write_tensors(path, layout, tensors.__getitem__, metadata)


def _layout_header(
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None
) -> tuple[bytes, list[str]]:
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise FlashGRPOError(
                f"safetensors metadata {key!r} is {type(value).__name__}; convert it to text"
            )
    for name, (dtype, _) in layout.items():
        if dtype not in _NAMES:
            raise FlashGRPOError(f"tensor `{name}` has dtype {dtype}; convert it to fp32 or bf16")
    # Wide types first, so that every tensor starts aligned to its own item size.
    names = sorted(layout, key=lambda n: (-layout[n][0].itemsize, n))
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    offset = 0
    for name in names:
        dtype, shape = layout[name]
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    return raw + b" " * (-len(raw) % 8), names


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file that is complete or absent, never half written.

    Raises:
        FlashGRPOError: the disk is full or the folder cannot be written; an older file stays.
    """
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that is complete or absent, never half written.

    Raises:
        FlashGRPOError: as `write_text_atomic`.
    """
    with _atomic(Path(path)) as handle:
        handle.write(data)


@contextmanager
def _atomic(path: Path) -> Iterator[BinaryIO]:
    """A binary handle whose content replaces `path` when the block ends without an error."""
    temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    fence.check(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        fence.check(path)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space or choose another folder"
        else:
            reason = f"{exc.strerror or exc}; check that the folder can be written"
        raise FlashGRPOError(f"{path}: not written, {reason}") from exc
    finally:
        with suppress(OSError):  # already renamed, or its folder never existed
            temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Windows cannot open folders, and renames are journaled there."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        # Some network file systems refuse to sync a folder; the data itself is on the disk.
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, hex."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as handle:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
    except OSError as exc:
        raise FlashGRPOError(f"{path}: cannot be read ({exc}); check the path and rights") from exc
    return digest.hexdigest()


def resolve_inside(base: str | os.PathLike[str], name: str) -> Path:
    """The path of `name` inside `base`, for names that come from a workflow or a download.

    Both kinds of slash separate, so that a workflow saved on Windows opens elsewhere.

    Returns:
        The absolute path with symbolic links resolved; it need not exist.

    Raises:
        FlashGRPOError: the name is empty, absolute, too long, holds `..`, a drive letter or a
            control character, or leads out of `base` through a symbolic link.
    """
    parts = path_parts(name)
    if not parts:
        raise FlashGRPOError(f"file name {name!r} is empty; choose a file")
    root = os.path.realpath(base)
    target = os.path.realpath(os.path.join(root, *parts))
    try:
        inside = os.path.commonpath([root, target]) == root
    except ValueError:  # different drives
        inside = False
    if not inside:
        raise FlashGRPOError(f"{name!r} leads out of {base}; choose a file inside that folder")
    return Path(target)


def path_parts(name: str) -> list[str]:
    """Split a relative name at both kinds of slash.

    Raises:
        FlashGRPOError: it could leave its folder, or no file can have it.
    """
    shown = repr(name[:80])
    if len(name) > MAX_NAME:
        raise FlashGRPOError(
            f"file name {shown}... has {len(name)} characters, the limit is {MAX_NAME}; shorten it"
        )
    if any(ord(char) < 32 for char in name):
        raise FlashGRPOError(f"file name {shown} holds a control character; rename the file")
    if re.match(r"^([\\/]|[A-Za-z]:)", name) or (os.name == "nt" and ":" in name):
        raise FlashGRPOError(
            f"file name {shown} is absolute; choose a name relative to the model folder"
        )
    parts = [part for part in re.split(r"[\\/]+", name) if part not in ("", ".")]
    for part in parts:
        if part == "..":
            raise FlashGRPOError(f"file name {shown} holds `..`; choose a file inside the folder")
        if len(part.encode("utf-8", "surrogatepass")) > MAX_PART:
            raise FlashGRPOError(f"file name {shown} has a part above {MAX_PART} bytes; shorten it")
    return parts
