"""Lazy and strict reading of safetensors checkpoints, sharded or not.

The header is parsed here rather than by the safetensors library. That gives one clear message for
each way in which a file can be broken, keeps files with unknown number formats readable by name,
and copies each tensor out of the file (no memory map): a file may be replaced while its tensors
are in use, also on Windows, and a file that shrinks cannot crash the process.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import re
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

MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library
_PLAIN_NAME = re.compile(r"[^/\\:\x00-\x1f]{1,255}")
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
    view = buffer.numpy().data
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
        if not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
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
        entries = {key: _entry(path, 8 + length, value) for key, value in header.items()}
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
