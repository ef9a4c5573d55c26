"""Weights of one network in a checkpoint: prefix stripped, quantisation undone, loaded strictly.

ComfyUI users have several kinds of 8-bit files. Loading a scaled one without its scales
"succeeds" and gives garbage, so every scale is either applied or the file is refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import FlashGRPOError
from ..files import TensorFile

log = logging.getLogger(__name__)

#: Shown names of stored dtypes.
SHORT: dict[str, str] = {
    "F32": "fp32",
    "F16": "fp16",
    "BF16": "bf16",
    "F64": "fp64",
    "F8_E4M3": "fp8_e4m3fn",
    "F8_E5M2": "fp8_e5m2",
    "I8": "int8",
}
_FP8 = ("F8_E4M3", "F8_E5M2")
#: Announced format -> how its weights are stored; their value is `weight * scale`.
_READABLE_FORMATS = {
    "float8_e4m3fn": _FP8,
    "float8_e5m2": _FP8,
    "int8_tensorwise": ("I8",),
}
#: What a mark may say beside its format without changing what the weight is.
_HARMLESS = ("format", "full_precision_matrix_mult")
_SCALE_TYPES = ("F32", "F16", "BF16")
_SCALES = (".scale_weight", ".weight_scale")  # old and new spelling
_DROPPED = (".scale_input", ".input_scale", ".comfy_quant")
_BITSANDBYTES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


class Weights:
    """The weights below one prefix of a checkpoint, as if they had never been quantised.

    Attributes:
        file: the checkpoint.
        prefix: what was stripped from the stored names.
        quantisation: `none`, `fp8` (plain 8-bit floats), `fp8_scaled` or `int8_scaled`.
        dtype: name of the dtype that most parameters are stored in (`bf16`, `fp8_e4m3fn`, ...).
        parameters: number of parameters, scales not counted.

    Raises:
        FlashGRPOError: a quantisation that cannot be undone here (nvfp4, mxfp8, ...).
    """

    def __init__(self, file: TensorFile, prefix: str = "", ignore: Iterable[str] = ()) -> None:
        self.file = file
        self.prefix = prefix
        self._scales: dict[str, str] = {}
        formats = _announced_formats(file, prefix)
        names = []
        skip = set(ignore)
        for stored in file.keys():
            if not stored.startswith(prefix):
                names.append(stored)  # strict loading will report it under its full name
                continue
            name = stored[len(prefix) :]
            if name in skip:
                continue
            if name == "scaled_fp8" or name.endswith(_DROPPED):
                if name.endswith(".comfy_quant"):
                    formats[name.removesuffix(".comfy_quant")] = _comfy_format(file, stored)
            elif name.endswith(_SCALES):
                module = name[: -len(_SCALES[0])]  # both suffixes have the same length
                self._scales[f"{module}.weight"] = stored
            else:
                names.append(name)
        self.names = frozenset(names)
        if f"{prefix}scaled_fp8" in file and not self._scales:
            raise FlashGRPOError(
                f"{file.path}: marked as scaled_fp8, but no weight has a scale_weight; download the "
                "file again"
            )
        self._refuse_unreadable(formats)
        self._summarise(formats)

    def _refuse_unreadable(self, formats: dict[str, str]) -> None:
        for module, kind in sorted(formats.items()):
            if kind not in _READABLE_FORMATS:
                raise _unsupported(self.file, kind, module)
            name = f"{module}.weight"
            if name not in self.names:
                continue
            if name not in self._scales:
                raise FlashGRPOError(
                    f"{self.file.path}: layer `{module}` is announced as {kind} but has no "
                    "weight_scale; download the file again"
                )
            if self.file.dtype_name(self.stored(name)) not in _READABLE_FORMATS[kind]:
                found = self.file.dtype_name(self.stored(name))
                raise _unsupported(self.file, f"{kind} in {found} tensors", name)
        for name in sorted(self.names):
            stored = self.stored(name)
            if stored not in self.file:
                continue
            if name.endswith(".weight_scale_2"):
                raise _unsupported(self.file, "nvfp4", name)
            if name.endswith(_BITSANDBYTES) or ".quant_state." in name:
                raise _unsupported(self.file, "bitsandbytes 4-bit", name)
            kind = self.file.dtype_name(stored)
            announced = formats.get(name.removesuffix(".weight"))
            if kind not in SHORT or (kind == "I8" and announced is None):
                raise _unsupported(self.file, kind, name)
        unused = sorted(set(self._scales) - self.names)
        if unused:
            raise FlashGRPOError(
                f"{self.file.path}: a scale without its weight `{unused[0]}`; "
                "download the file again"
            )
        for name, stored in self._scales.items():
            shape, rows = self.file.shape(stored), self.shape(name)[0]
            if shape not in ((), (1,), (rows,), (rows, 1), (1, 1)):
                raise _unsupported(self.file, f"block-wise scales {list(shape)}", name)
            if self.file.dtype_name(stored) not in _SCALE_TYPES:
                kind = self.file.dtype_name(stored)
                raise _unsupported(self.file, f"scales of type {kind}", name)

    def _summarise(self, formats: dict[str, str]) -> None:
        count: dict[str, int] = {}
        for name in self.names:
            kind = self.file.dtype_name(self.stored(name))
            count[kind] = count.get(kind, 0) + _numel(self.shape(name))
        self.parameters = sum(count.values())
        largest = max(count, key=lambda kind: (count[kind], kind), default="F32")
        self.dtype = SHORT[largest]
        if self._scales or formats:
            self.quantisation = "int8_scaled" if "I8" in count else "fp8_scaled"
        else:
            self.quantisation = "fp8" if any(kind in _FP8 for kind in count) else "none"

    def stored(self, name: str) -> str:
        """Name in the file of a weight."""
        prefixed = self.prefix + name
        return prefixed if prefixed in self.file else name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight."""
        return self.file.shape(self.stored(name))

    def get(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Read one weight, dequantised.

        Scaled 8-bit weights are multiplied in fp32: `w.float() * scale`.
        """
        tensor, scale = self.raw(name, device)
        if scale is not None:
            if scale.dim():
                scale = scale.reshape(-1, *([1] * (tensor.ndim - 1)))
            tensor = tensor.float() * scale
        return tensor.to(dtype)

    def raw(
        self, name: str, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read one weight as it is stored, and its fp32 scale: scalar, `[rows]`, or None."""
        tensor = self.file.get(self.stored(name)).to(device)
        if name not in self._scales:
            return tensor, None
        scale = self.file.get(self._scales[name]).to(device, torch.float32)
        if not bool(torch.isfinite(scale).all()):
            raise FlashGRPOError(
                f"{self.file.path}: the scale of `{name}` is not finite; download the file again"
            )
        return tensor, scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _unsupported(file: TensorFile, kind: str, where: str) -> FlashGRPOError:
    return FlashGRPOError(
        f"{file.path}: quantised as {kind} (`{where}`), which cannot be trained; use the bf16, "
        "fp16, fp8 or fp8_scaled file of this model"
    )


def _announced_formats(file: TensorFile, prefix: str) -> dict[str, str]:
    """Quantised modules that the header lists: `{"layers": {module: {"format": ...}}}`."""
    text = file.metadata.get("_quantization_metadata")
    if not text:
        return {}
    try:
        layers = json.loads(text).get("layers", {})
        found = {name.removeprefix(prefix): _format(v) for name, v in layers.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FlashGRPOError(
            f"{file.path}: unreadable _quantization_metadata ({exc}); download the file again"
        ) from exc
    return found


def _format(mark: dict[str, Any]) -> str:
    """The format of a mark, with whatever else it says: a rotation makes it another format."""
    further = [key for key, value in sorted(mark.items()) if value and key not in _HARMLESS]
    if "convrot" not in further:
        further = [key for key in further if not key.startswith("convrot")]
    return " with ".join([str(mark["format"]), *further])


def _comfy_format(file: TensorFile, stored: str) -> str:
    """Format named by a `comfy_quant` tensor, which holds the bytes of a JSON object."""
    raw = bytes(file.get(stored).reshape(-1).view(torch.uint8).tolist())
    try:
        return _format(json.loads(raw.decode("utf-8")))
    except (ValueError, KeyError, TypeError) as exc:
        raise FlashGRPOError(
            f"{file.path}: unreadable quantisation mark `{stored}` ({exc}); download the file again"
        ) from exc


def fill(
    model: nn.Module,
    weights: Weights,
    names: dict[str, str],
    dtype: torch.dtype,
    device: torch.device | str,
    islands: tuple[str, ...] = (),
    tied: Collection[str] = (),
    later: Collection[str] = (),
) -> None:
    """Give a model on the meta device its weights, one tensor at a time and strictly.

    Args:
        model: built under `torch.device("meta")`.
        weights: the checkpoint.
        names: model key -> weight name, for every weight of the checkpoint.
        dtype: dtype of the parameters.
        device: where the parameters go.
        islands: parts of a dotted key that stay fp32 when `dtype` is a 16-bit type.
        tied: model keys that share another key's parameter and are set by the caller.
        later: model keys that are checked here but set by the caller.

    Raises:
        FlashGRPOError: keys are missing or left over, or a shape differs.
    """
    state = model.state_dict()
    wanted = {key: tensor.shape for key, tensor in state.items() if key not in tied}
    missing = sorted(wanted.keys() - names.keys())
    extra = sorted(names[key] for key in names.keys() - wanted.keys())
    if missing or extra:
        told = []
        if missing:
            told.append(f"missing: {shortened(missing)}")
        if extra:
            told.append(f"unknown: {shortened(extra)}")
        raise FlashGRPOError(
            f"{weights.file.path}: does not fit {type(model).__name__} ({'; '.join(told)}); "
            "use a complete checkpoint of a supported model"
        )
    for key, shape in wanted.items():
        stored = weights.shape(names[key])
        if tuple(shape) != stored:
            raise FlashGRPOError(
                f"{weights.file.path}: `{names[key]}` has shape {list(stored)}, expected "
                f"{list(shape)}; use a complete checkpoint of a supported model"
            )
    for key in wanted.keys() - set(later):
        keep = any(part in islands for part in key.split("."))
        target = torch.float32 if keep else dtype
        tensor = weights.get(names[key], target, device)
        owner, _, leaf = key.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor


def finish(model: nn.Module) -> None:
    """Set eval mode, freeze, and check that nothing was left on the meta device."""
    model.eval()
    model.requires_grad_(False)
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta]
    if left:
        raise FlashGRPOError(
            f"{type(model).__name__}: no values for {shortened(left)}; "
            "install a supported version of diffusers and transformers"
        )


def shortened(names: list[str], limit: int = 6) -> str:
    """The first names of a list and how many there are more."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def name_map(weights: Weights, translate: Callable[[str], str | None]) -> dict[str, str]:
    """Model key -> weight name; a weight without a model key keeps its own name, to be reported."""
    return {(translate(name) or name): name for name in sorted(weights.names)}


def component_folder(path: str | Path, component: str) -> Path:
    """`path`, or the sub-folder of a Diffusers pipeline folder that holds one component.

    Raises:
        FlashGRPOError: the pipeline has two transformers (experts), so the choice is the user's.
    """
    path = Path(path)
    inner = path / component
    if not (path / "model_index.json").is_file() or not inner.is_dir():
        return path
    second = path / f"{component}_2"
    if component == "transformer" and second.is_dir() and any(second.glob("*.safetensors")):
        raise FlashGRPOError(
            f"{path}: holds two experts; choose {inner} (high noise) or {second} (low noise)"
        )
    return inner
