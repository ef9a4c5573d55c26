"""Reading and writing of model files: safetensors only, strict, lazy and atomic.

The reader parses the safetensors header itself. That gives one clear message for each way in
which a file can be broken, keeps formats that the installed library does not know readable by
name, and copies each tensor out of the file (no memory map): a file may be replaced while its
tensors are in use, also on Windows, and a file that shrinks cannot crash the process.

The writer sorts everything, because the safetensors library writes its metadata in random order
and equal runs must give equal bytes.

Format: https://github.com/huggingface/safetensors#format
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .errors import FlashGRPOError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library
MAX_NAME = 1024  # characters of a relative path
MAX_PART = 255  # characters of one path component, the limit of common file systems
_CHUNK = 1 << 22
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.safetensors$")


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies: file, absolute byte range, shape and the stored dtype's name."""

    file: Path
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str


class TensorFile:
    """A lazy reader over one or several safetensors files that form one checkpoint.

    Made by `open_tensors`. Nothing but headers is held in memory.

    Attributes:
        path: what was opened: a file, an index file or a folder.
        files: the safetensors files behind it, sorted.
        metadata: the merged `__metadata__` of the headers.
    """

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path = path
        self.files = sorted(files)
        self.metadata: dict[str, str] = {}
        self._entries: dict[str, _Entry] = {}
        for file in self.files:
            entries, metadata = _read_header(file)
            twice = self._entries.keys() & entries.keys()
            if twice:
                raise FlashGRPOError(
                    f"{file}: tensor `{min(twice)}` is also in another shard of {path}; "
                    "keep the shards of one model only in the folder"
                )
            self._entries.update(entries)
            self.metadata.update(metadata)

    def keys(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header."""
        return self._entry(key).shape

    def dtype_name(self, key: str) -> str:
        """Stored dtype as the file spells it (`BF16`, `F8_E4M3`, ...), known to torch or not."""
        return self._entry(key).dtype

    def dtype(self, key: str) -> torch.dtype:
        """Stored dtype of a tensor.

        Raises:
            FlashGRPOError: the file uses a number format that this version does not read.
        """
        name = self.dtype_name(key)
        if name not in DTYPES:
            raise FlashGRPOError(
                f"{self.path}: tensor `{key}` has the number format {name}, which cannot be read; "
                "use a bf16, fp16, fp32, fp8 or fp8_scaled file"
            )
        return DTYPES[name]

    def get(self, key: str) -> torch.Tensor:
        """Read one tensor into CPU memory, in its stored dtype."""
        entry = self._entry(key)
        dtype = self.dtype(key)
        buffer = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        try:
            with open(entry.file, "rb") as handle:
                handle.seek(entry.begin)
                _read_into(handle, buffer)
        except (OSError, EOFError) as exc:
            raise FlashGRPOError(
                f"{entry.file}: reading tensor `{key}` failed ({exc}); the file changed or the "
                "disk has an error: check it and load again"
            ) from exc
        return buffer.view(dtype).reshape(entry.shape)

    def _entry(self, key: str) -> _Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise FlashGRPOError(
                f"{self.path}: no tensor `{key}`; the file is not the expected kind of model"
            ) from None


def _read_into(handle: BinaryIO, buffer: torch.Tensor) -> None:
    view = memoryview(buffer.numpy())
    done = 0
    while done < len(view):
        count = handle.readinto(view[done : done + (1 << 28)])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"ended {len(view) - done} bytes early")
        done += count


def open_tensors(path: str | os.PathLike[str]) -> TensorFile:
    """Open a checkpoint for lazy reading.

    Args:
        path: a `.safetensors` file, a `*.safetensors.index.json` index, or a folder that holds
            either (a Diffusers model folder).

    Raises:
        FlashGRPOError: missing, empty, truncated or corrupt file; GGUF; pickled checkpoint;
            an index that names missing shards.
    """
    path = Path(path)
    if path.is_dir():
        return TensorFile(path, _folder_files(path))
    if not path.exists():
        raise FlashGRPOError(
            f"{path}: no such file; check the path or put the model in the folder it names"
        )
    if path.name.endswith(".index.json"):
        return TensorFile(path, _index_files(path))
    return TensorFile(path, [path])


def _folder_files(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    indexes = [p for p in found if p.name.endswith(".safetensors.index.json")]
    if len(indexes) > 1:
        # Diffusers folders may hold variants (`model.fp16.safetensors.index.json`) side by side.
        raise FlashGRPOError(
            f"{folder}: {len(indexes)} sharded models ({', '.join(p.name for p in indexes)}); "
            "give the path of one index file"
        )
    if indexes:
        return _index_files(indexes[0])
    files = [p for p in found if p.name.endswith(".safetensors")]
    if len(files) == 1:
        return files
    if not files:
        other = [p.name for p in found if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf")]
        extra = f" (only {', '.join(other[:3])}, which is refused)" if other else ""
        raise FlashGRPOError(
            f"{folder}: no .safetensors file in this folder{extra}; "
            "choose the folder that holds the model's .safetensors"
        )
    shards = [_SHARD.match(p.name) for p in files]
    kinds = {(m["stem"], int(m["total"])) for m in shards if m}
    if all(shards) and len(kinds) == 1 and len(files) == next(iter(kinds))[1]:
        return files
    raise FlashGRPOError(
        f"{folder}: {len(files)} .safetensors files and no index that says how they belong "
        "together; give the path of one file"
    )


def _index_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not all(isinstance(name, str) for name in names) or not names:
            raise TypeError("weight_map does not name files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FlashGRPOError(
            f"{index}: not a safetensors index ({exc}); download the index file again"
        ) from exc
    files = []
    for name in names:
        # The index is downloaded data: it may only name its neighbours. A neighbour may be a
        # symbolic link (download caches are built that way), so links are not resolved here.
        if len(_path_parts(name)) != 1:
            raise FlashGRPOError(
                f"{index}: shard name {name!r} is not a plain file name; "
                "download the index file again"
            )
        shard = index.parent / name
        if not shard.is_file():
            raise FlashGRPOError(
                f"{index}: shard {name} is missing; download all {len(names)} shards into "
                f"{index.parent}"
            )
        files.append(shard)
    return files


def _read_header(path: Path) -> tuple[dict[str, _Entry], dict[str, str]]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            start = handle.read(8)
            length = int.from_bytes(start, "little") if len(start) == 8 else -1
            plausible = 2 <= length <= min(MAX_HEADER, size - 8)
            raw = handle.read(length) if plausible else start + handle.read(56)
    except OSError as exc:
        raise FlashGRPOError(f"{path}: cannot be read ({exc}); check the path and rights") from exc
    if size == 0:
        raise FlashGRPOError(f"{path}: the file is empty; download it again")
    if not plausible or not raw.startswith(b"{"):
        raise _not_safetensors(path, start + raw if plausible else raw, size, length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ holds values that are not text")
        entries = {
            key: _entry(path, 8 + length, value) for key, value in header.items()
        }
        end = 8 + length
        for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
            if entry.begin != end:
                raise ValueError(f"a gap or overlap at byte {end}")
            end = entry.end
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FlashGRPOError(
            f"{path}: the safetensors header is corrupt ({exc}); download the file again"
        ) from exc
    if end > size:
        raise FlashGRPOError(
            f"{path}: truncated, {end - size} of {end} bytes are missing; download it again"
        )
    if end < size:
        raise FlashGRPOError(
            f"{path}: {size - end} bytes too many after the last tensor; download it again"
        )
    return entries, metadata


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(path: Path, data_start: int, value: dict[str, Any]) -> _Entry:
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    dtype = value["dtype"]
    numbers = (begin, end, *shape)
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or begin > end:
        raise ValueError(f"impossible shape or offsets {value}")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError(f"shape {list(shape)} of {dtype} does not fill {end - begin} bytes")
    return _Entry(path, data_start + begin, data_start + end, shape, str(dtype))


def _not_safetensors(path: Path, start: bytes, size: int, length: int) -> FlashGRPOError:
    """Say what a file is that has no safetensors header. `start` is its first bytes."""
    suffix = path.suffix.lower()
    if start.startswith(b"GGUF") or suffix == ".gguf":
        return FlashGRPOError(
            f"{path}: a GGUF file; GGUF is for inference only and cannot be trained, use the "
            ".safetensors version of this model (bf16, fp16, fp8 or fp8_scaled)"
        )
    pickled = start.startswith(b"PK\x03\x04") or re.match(rb"\x80[\x02-\x05]", start)
    if pickled or suffix in (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle"):
        return FlashGRPOError(
            f"{path}: a pickled checkpoint, which can run code when it is loaded; "
            "use the .safetensors version of this model"
        )
    if start.startswith(b"version https://git-lfs"):
        return FlashGRPOError(
            f"{path}: a Git LFS pointer of {size} bytes, not the model; run `git lfs pull` or "
            "download the file itself"
        )
    if start.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return FlashGRPOError(
            f"{path}: a web page was saved instead of the model; download the file again"
        )
    if size < 8 or size - 8 < length <= MAX_HEADER:
        return FlashGRPOError(
            f"{path}: truncated, only {size} bytes are left of the file; download it again"
        )
    return FlashGRPOError(
        f"{path}: not a safetensors file (no header); choose a .safetensors model file"
    )


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
            data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
            handle.write(data)  # type: ignore[arg-type]
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
    with _atomic(Path(path)) as handle:
        handle.write(text.encode("utf-8"))


@contextmanager
def _atomic(path: Path) -> Iterator[BinaryIO]:
    """A binary handle whose content replaces `path` when the block ends without an error."""
    temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space or choose another folder"
        else:
            reason = f"{exc.strerror or exc}; check that the folder can be written"
        raise FlashGRPOError(f"{path}: not written, {reason}") from exc
    finally:
        temporary.unlink(missing_ok=True)


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
    parts = _path_parts(name)
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


def _path_parts(name: str) -> list[str]:
    """Split a relative name, refusing everything that could leave its folder."""
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
            raise FlashGRPOError(
                f"file name {shown} has a part above {MAX_PART} bytes; shorten it"
            )
    return parts
