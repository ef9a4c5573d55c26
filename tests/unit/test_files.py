"""Reading and writing of model files: every way a file can be broken has its own message."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flashgrpo_core import files
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.files import (
    open_tensors,
    resolve_inside,
    save_tensors,
    sha256_file,
    write_tensors,
    write_text_atomic,
)

ROOT = Path(__file__).resolve().parents[2]


def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 5, generator=generator),
        "a.weight": torch.randn(4, 2, generator=generator).bfloat16(),
        "half": torch.randn(7, generator=generator).half(),
        "fp8": torch.randn(2, 3, generator=generator).to(torch.float8_e4m3fn),
        "fp8_5": torch.randn(3, generator=generator).to(torch.float8_e5m2),
        "alpha": torch.tensor(32.0),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 6, generator=generator).t(),
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    shapes = left.shape == right.shape and left.dtype == right.dtype
    return shapes and torch.equal(*as_bytes)


def test_round_trip_and_the_safetensors_library_agrees(tmp_path: Path) -> None:
    path = tmp_path / "ünï code" / "model.safetensors"
    tensors = sample()
    digest = save_tensors(path, tensors, {"z": "1", "a": "zwölf"})
    assert digest == sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    ours = open_tensors(path)
    assert ours.keys() == sorted(tensors)
    assert ours.metadata == {"a": "zwölf", "z": "1"}
    with safe_open(path, "pt") as theirs:
        assert theirs.metadata() == {"a": "zwölf", "z": "1"}
        for key, tensor in tensors.items():
            assert ours.shape(key) == tuple(tensor.shape)
            assert ours.dtype(key) == tensor.dtype
            assert same(ours.get(key), tensor)
            assert same(theirs.get_tensor(key), tensor)


def test_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    tensors = {key: value.contiguous() for key, value in sample().items()}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    opened = open_tensors(str(tmp_path / "x.safetensors"))
    assert all(same(opened.get(key), value) for key, value in tensors.items())


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    tensors = sample()
    one = save_tensors(tmp_path / "1.safetensors", tensors, {"b": "2", "a": "1"})
    back = dict(reversed(tensors.items()))
    assert one == save_tensors(tmp_path / "2.safetensors", back, {"a": "1", "b": "2"})
    changed = {**tensors, "alpha": torch.tensor(31.0)}
    assert one != save_tensors(tmp_path / "3.safetensors", changed, {"a": "1", "b": "2"})


def test_equal_bytes_in_another_process(tmp_path: Path) -> None:
    """The safetensors library fails this: its metadata order differs between processes."""
    code = (
        "import sys, torch; from flashgrpo_core.files import save_tensors; "
        "print(save_tensors(sys.argv[1], {'w': torch.arange(6.)}, "
        "{str(i): str(i) for i in range(20)}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path / "there.safetensors")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    metadata = {str(i): str(i) for i in range(20)}
    here = save_tensors(tmp_path / "here.safetensors", {"w": torch.arange(6.0)}, metadata)
    assert done.stdout.strip() == here


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": torch.ones(1000)})
    opened = open_tensors(path)
    tensor = opened.get("w")
    path.write_bytes(b"")
    assert torch.equal(tensor, torch.ones(1000))
    with pytest.raises(FlashGRPOError, match="reading tensor `w` failed"):
        opened.get("w")


# ------------------------------------------------------------------------------- broken files


def test_truncated_at_every_kind_of_offset(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_tensors(whole, sample(), {"k": "v"})
    data = whole.read_bytes()
    header = int.from_bytes(data[:8], "little")
    offsets = [1, 7, 8, 9, header // 2, header + 7, header + 8, header + 9, len(data) - 1]
    for offset in offsets:
        cut = tmp_path / f"cut{offset}.safetensors"
        cut.write_bytes(data[:offset])
        with pytest.raises(FlashGRPOError, match="truncated.*download it again") as error:
            open_tensors(cut)
        assert "\n" not in str(error.value) and str(cut) in str(error.value)
    (tmp_path / "long.safetensors").write_bytes(data + b"\0\0\0")
    with pytest.raises(FlashGRPOError, match="3 bytes too many"):
        open_tensors(tmp_path / "long.safetensors")


def test_other_containers_are_named(tmp_path: Path) -> None:
    buffer = tmp_path / "weights.pt"
    torch.save({"w": torch.ones(2)}, buffer)
    zipped = buffer.read_bytes()
    cases = {
        "model.gguf": (b"GGUF\x03\0\0\0" + b"\0" * 100, "GGUF is for inference only"),
        "renamed.safetensors": (b"GGUF\x03\0\0\0" + b"\0" * 100, "a GGUF file"),
        "short.gguf": (b"not a model at all", "a GGUF file"),
        "torch.ckpt": (zipped, "pickled checkpoint, which can run code"),
        "zip.safetensors": (zipped, "pickled checkpoint, which can run code"),
        "old.safetensors": (pickle.dumps({"w": 1}), "pickled checkpoint"),
        "text.bin": (b"0123456789abcdef", "pickled checkpoint"),
        "empty.safetensors": (b"", "the file is empty"),
        "page.safetensors": (b"<!DOCTYPE html><html>" + b" " * 90, "a web page was saved"),
        "lfs.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
        "noise.safetensors": (b"\xff" * 200, "not a safetensors file"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(FlashGRPOError, match=message):
            open_tensors(path)
    with pytest.raises(FlashGRPOError, match="no such file"):
        open_tensors(tmp_path / "absent.safetensors")


def raw_file(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"{" + b"x" * 40, 0),
        ({"w": entry(0, 8, [3])}, 8),  # shape and bytes disagree
        ({"w": entry(8, 0, [2])}, 8),  # backwards
        ({"w": entry(0, 8, [-2])}, 8),
        ({"w": entry(4, 12, [2])}, 12),  # a hole
        ({"w": entry(0, 8, [2]), "v": entry(4, 12, [2])}, 12),  # an overlap
        ({"w": {"dtype": "F32", "shape": [2]}}, 8),
        ({"w": entry(0, 8, [2]), "__metadata__": {"k": 1}}, 8),
        (b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2 + b"}", 4),
        ({"w": [1, 2]}, 8),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: object, size: int) -> None:
    path = raw_file(tmp_path / "x.safetensors", header, b"\0" * size)
    with pytest.raises(FlashGRPOError, match="header is corrupt"):
        open_tensors(path)


def test_unknown_number_format_is_listed_but_not_read(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"w": entry(0, 3, [6], "F4")}, b"\0" * 3)
    opened = open_tensors(path)
    assert opened.dtype_name("w") == "F4"
    with pytest.raises(FlashGRPOError, match="number format F4"):
        opened.get("w")
    with pytest.raises(FlashGRPOError, match="no tensor `v`"):
        opened.shape("v")


# ------------------------------------------------------------------------------ shards, folders


def shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = sample()
    names = sorted(tensors)
    parts = (names[::2], names[1::2])
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_tensors(folder / name, {key: tensors[key] for key in part}, {f"k{number}": "v"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_shards_by_index_by_folder_and_without_index(tmp_path: Path) -> None:
    tensors = shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for path in (index, tmp_path):
        opened = open_tensors(path)
        assert opened.keys() == sorted(tensors) and len(opened.files) == 2
        assert opened.metadata == {"k1": "v", "k2": "v"}
        assert all(same(opened.get(key), value) for key, value in tensors.items())
    index.unlink()
    assert open_tensors(tmp_path).keys() == sorted(tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert len(open_tensors(tmp_path)) < len(tensors)  # one file left: used as it is
    save_tensors(tmp_path / "other.safetensors", {"w": torch.ones(1)})
    with pytest.raises(FlashGRPOError, match="no index that says how they belong"):
        open_tensors(tmp_path)


def test_broken_indexes(tmp_path: Path) -> None:
    shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    good = index.read_text()
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"w": 3}}'):
        index.write_text(text)
        with pytest.raises(FlashGRPOError, match="not a safetensors index"):
            open_tensors(index)
    for name in ("../x.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", "a/b", ".."):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(FlashGRPOError, match="not a plain file name"):
            open_tensors(index)
    index.write_text(good)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FlashGRPOError, match="shard model-00002-of-00002.safetensors is missing"):
        open_tensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        path = tmp_path / f"m-{number:05d}-of-00002.safetensors"
        save_tensors(path, {"w": torch.ones(number)})
    with pytest.raises(FlashGRPOError, match="`w` is also in another shard"):
        open_tensors(tmp_path)


def test_folders_without_models(tmp_path: Path) -> None:
    with pytest.raises(FlashGRPOError, match="no .safetensors file in this folder;"):
        open_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FlashGRPOError, match=r"only pytorch_model.bin, which is refused"):
        open_tensors(tmp_path)


# ------------------------------------------------------------------------------------- writing


class FullDisk:
    """A real file on a disk that is full after `room` bytes."""

    def __init__(self, handle, room: int) -> None:
        self.handle, self.room = handle, room

    def write(self, data) -> int:
        piece = bytes(data)[: self.room]
        self.handle.write(piece)
        self.room -= len(piece)
        if len(piece) < len(bytes(data)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(piece)

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.handle.close()

    def __getattr__(self, name: str):
        return getattr(self.handle, name)


@pytest.mark.parametrize("room", [0, 5, 100, 900])
def test_full_disk_keeps_the_old_file_and_no_litter(tmp_path: Path, monkeypatch, room: int) -> None:
    path = tmp_path / "lora.safetensors"
    before = save_tensors(path, {"w": torch.zeros(3)})
    monkeypatch.setattr(
        files, "open", lambda file, mode: FullDisk(open(file, mode), room), raising=False
    )
    with pytest.raises(FlashGRPOError, match="the disk is full"):
        save_tensors(path, {"w": torch.ones(1000)})
    with pytest.raises(FlashGRPOError, match="the disk is full"):
        write_text_atomic(tmp_path / "new.json", "x" * 1000)
    monkeypatch.undo()
    assert sha256_file(path) == before
    assert os.listdir(tmp_path) == ["lora.safetensors"]


def test_other_write_failures(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FlashGRPOError, match="not written"):
        save_tensors(tmp_path / "file" / "x.safetensors", {"w": torch.ones(1)})

    def interrupted(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_tensors(tmp_path / "y.safetensors", {"w": torch.ones(1)})
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(FlashGRPOError, match="'r' is int; convert it to text"):
        save_tensors(path, {"w": torch.ones(1)}, {"r": 16})  # type: ignore[dict-item]
    with pytest.raises(FlashGRPOError, match="dtype torch.complex64"):
        save_tensors(path, {"w": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(FlashGRPOError, match="announced as"):
        write_tensors(path, {"w": (torch.float32, (2,))}, lambda name: torch.ones(3))
    assert os.listdir(tmp_path) == []


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    write_text_atomic(path, "eins")
    write_text_atomic(path, "zwölf\n")
    assert path.read_bytes() == "zwölf\n".encode()
    assert os.listdir(path.parent) == ["x.json"]


# -------------------------------------------------------------------------------------- paths


def test_resolve_inside_accepts_what_lies_inside(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    assert resolve_inside(tmp_path, "a b ü.safetensors") == tmp_path / "a b ü.safetensors"
    assert resolve_inside(tmp_path, "sub\\x.txt") == tmp_path / "sub" / "x.txt"
    assert resolve_inside(tmp_path, "./sub//x.txt") == tmp_path / "sub" / "x.txt"
    (tmp_path / "link").symlink_to(tmp_path / "sub")
    assert resolve_inside(tmp_path, "link/x") == tmp_path / "sub" / "x"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../../x",
        "a\\..\\..\\x",
        "/etc/passwd",
        "\\\\server\\share\\x",
        "//server/share",
        "C:\\x",
        "c:x",
        "a\0b",
        "a\nb",
        "x" * 300,
        "a/" * 600,
        "ü" * 200,
    ],
)
def test_resolve_inside_refuses(tmp_path: Path, name: str) -> None:
    with pytest.raises(FlashGRPOError):
        resolve_inside(tmp_path, name)


def test_symbolic_links_cannot_escape(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "secret").write_text("x")
    (base / "file").symlink_to(tmp_path / "secret")
    (base / "up").symlink_to(tmp_path)
    (base / "loop").symlink_to(base / "loop")
    (tmp_path / "base2").mkdir()
    (base / "sibling").symlink_to(tmp_path / "base2")
    for name in ("file", "up/secret", "up/new", "sibling/x"):
        with pytest.raises(FlashGRPOError, match="leads out of"):
            resolve_inside(base, name)


def test_hash_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FlashGRPOError, match="cannot be read"):
        sha256_file(tmp_path / "absent")
