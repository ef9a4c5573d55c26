"""Weights of reward models on disk: found, read without running code, and loaded strictly.

Reward models are published as Hugging Face folders (`config.json`, `*.safetensors`, tokenizer
files), as single safetensors files, or as pickles of `torch.save`. Pickles are read with
`weights_only=True`, which builds tensors and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import FlashGRPOError
from ..files import TensorFile, open_tensors
from ..wan.weights import finish, shortened

Tensors = Mapping[str, torch.Tensor]

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


class _Stored(Mapping[str, torch.Tensor]):
    """A safetensors checkpoint as a mapping that reads one tensor at a time."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file)


def weights_file(path: Path) -> Path:
    """The file or folder that `read_tensors` can read: safetensors first, else the one pickle.

    Raises:
        FlashGRPOError: there are no weights, or several.
    """
    if not path.is_dir():
        return path
    # Only this folder: a download may hold the same weights again in sub-folders.
    names = [p for p in sorted(path.iterdir()) if p.is_file()]
    if any(p.name.endswith(".safetensors") for p in names):
        return path
    found = [p for p in names if p.suffix.lower() in _PICKLED]
    if len(found) != 1:
        some = f"{len(found)} of them ({shortened([p.name for p in found])})" if found else "none"
        raise FlashGRPOError(
            f"{path}: expected one weights file (.safetensors, .pt, .pth or .bin), found {some}: "
            "keep one model in a folder"
        )
    return found[0]


def read_tensors(path: Path) -> Tensors:
    """The tensors of a checkpoint; lazily where the format allows it.

    Args:
        path: a safetensors file, index or folder, or a pickle of `torch.save`.

    Raises:
        FlashGRPOError: missing or damaged, or a pickle that holds more than tensors.
    """
    path = weights_file(path)
    if path.is_dir() or path.suffix.lower() not in _PICKLED:
        return _Stored(open_tensors(path))
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except FileNotFoundError:
        raise FlashGRPOError(f"{path}: no such file; check the path") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise FlashGRPOError(f"{path}: not readable ({reason}); download it again") from None
    except Exception as exc:
        # The reader of tensors refuses everything else; its error class lives in a module that
        # this one need not know.
        if type(exc).__name__ != "UnpicklingError":
            raise
        raise FlashGRPOError(
            f"{path}: holds more than tensors, which could run code when it is loaded: use the "
            ".safetensors version of this model"
        ) from None
    for wrapper in ("state_dict", "model", "module"):
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    tensors = isinstance(found, Mapping) and all(torch.is_tensor(v) for v in found.values())
    if not tensors or not found:
        raise FlashGRPOError(f"{path}: holds no state dict of tensors; use the model's weights")
    return dict(found)


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as handle:
        return handle.read(4) == b"PK\x03\x04"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder.

    Raises:
        FlashGRPOError: it is missing or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FlashGRPOError(
            f"{path} is missing: download it from where the weights come from"
        ) from None
    except (OSError, ValueError) as exc:
        raise FlashGRPOError(f"{path}: no readable JSON ({exc}); download it again") from None
    if not isinstance(value, dict):
        raise FlashGRPOError(f"{path}: no JSON object; download it again")
    return value


def build(make: Callable[[], nn.Module]) -> Any:
    """Make a network whose parameters take no memory yet; buffers have their values."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return make()


def load_weights(
    network: nn.Module,
    tensors: Tensors,
    names: Mapping[str, str],
    dtype: torch.dtype,
    source: Path,
    fp32: tuple[str, ...] = (),
) -> None:
    """Give a network made by `build` its weights, one tensor at a time and strictly.

    Args:
        network: the network; frozen and in eval mode afterwards.
        tensors: the checkpoint.
        names: model key -> checkpoint key of every weight that should be used.
        dtype: dtype of the parameters.
        source: the checkpoint's path, for messages.
        fp32: beginnings of model keys that stay fp32.

    Raises:
        FlashGRPOError: weights are missing or left over, or a shape differs.
    """
    wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    missing = sorted(wanted.keys() - names.keys())
    extra = sorted(names[key] for key in names.keys() - wanted.keys())
    if missing or extra:
        told = [f"missing: {shortened(missing)}"] if missing else []
        told += [f"unknown: {shortened(extra)}"] if extra else []
        raise FlashGRPOError(
            f"{source}: does not fit {type(network).__name__} ({'; '.join(told)}): use the complete "
            "checkpoint of this reward, with its own config.json"
        )
    for key, shape in wanted.items():
        tensor = tensors[names[key]]
        if tuple(tensor.shape) != shape:
            raise FlashGRPOError(
                f"{source}: `{names[key]}` has shape {list(tensor.shape)}, expected {list(shape)}: "
                "use the config.json that belongs to these weights"
            )
        target = torch.float32 if key.startswith(fp32) and fp32 else dtype
        owner, _, leaf = key.rpartition(".")
        module = network.get_submodule(owner)
        # A copy of its own: the checkpoint may be mapped from the disk.
        value = tensor.to(target, copy=True).contiguous()
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value
    finish(network)
