"""Read Wan LoRA files in every spelling that trainers write.

| written by              | key of one module                                              |
|-------------------------|----------------------------------------------------------------|
| ComfyUI, this project   | `diffusion_model.blocks.0.self_attn.q.lora_A.weight`           |
| kohya, musubi           | `lora_unet_blocks_0_self_attn_q.lora_down.weight`              |
| Wan-Fun                 | `lora_unet__blocks_0_self_attn_q.lora_down.weight`             |
| diffusers               | `transformer.blocks.0.attn1.to_q.lora_A.weight`                |
| PEFT                    | `base_model.model.blocks.0.attn1.to_q.lora_A.weight`           |
| DiffSynth               | `blocks.0.self_attn.q.lora_A.default.weight`                   |

The scale is alpha / rank. Alpha comes from the `.alpha` tensor, else from the file's header
(diffusers) or `adapter_config.json` (PEFT), else it equals the rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import FlashGRPOError
from ..files import TensorFile, open_tensors
from . import names
from .weights import shortened

_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "pipe.dit.",
)
_FLAT_PREFIX = re.compile(r"^(?:lora_unet_|lycoris_)_?(?=[a-z])")
_ENDINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"\.lora_A(?:\.[A-Za-z]\w*)??(?:\.weight)?$", "A"),
        (r"\.lora_B(?:\.[A-Za-z]\w*)??(?:\.weight)?$", "B"),
        (r"(?:\.lora_down|[._]lora\.down|\.lora_linear_layer\.down)(?:\.weight)?$", "A"),
        (r"(?:\.lora_up|[._]lora\.up|\.lora_linear_layer\.up)(?:\.weight)?$", "B"),
        (r"\.alpha$", "alpha"),
        (r"\.diff$", "diff"),
        (r"\.diff_b$", "diff_b"),
    )
)
_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    ("dora_scale", "DoRA"),
    ("lora_magnitude_vector", "DoRA"),
    ("lora_mid", "LoCon with a middle matrix"),
    ("hada_", "LoHa"),
    ("lokr_", "LoKr"),
    ("oft_", "OFT"),
    ("set_weight", "weight replacement"),
    ("reshape_weight", "weight reshaping"),
    ("w_norm", "norm replacement"),
    ("b_norm", "norm replacement"),
)
_DIFFUSERS_MARKS = (".attn1.", ".attn2.", ".ffn.net.", "condition_embedder.", "proj_out")


@dataclass(frozen=True)
class LoraPair:
    """What a LoRA file says about one module, in fp32.

    Attributes:
        A: `[r, in]` (or a convolution's `[r, in, kt, kh, kw]`), None when only `diff` is given.
        B: `[out, r]`, None with A.
        alpha: the pair is scaled by alpha / r.
        diff: plain addition to the weight (to the parameter itself for modulation tables).
        diff_b: plain addition to the bias.
    """

    A: torch.Tensor | None
    B: torch.Tensor | None
    alpha: float
    diff: torch.Tensor | None = None
    diff_b: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Rank r of the pair, 0 without one."""
        return 0 if self.A is None else self.A.shape[0]

    @property
    def scale(self) -> float:
        """Factor alpha / r of the product B A, 0 without a pair."""
        return self.alpha / self.rank if self.rank else 0.0

    def delta(self) -> torch.Tensor | None:
        """Full change of the weight at strength 1, `scale * B A + diff`, fp32; None if none."""
        total = self.diff
        if self.A is not None and self.B is not None:
            product = self.scale * (self.B.flatten(1) @ self.A.flatten(1))
            product = product.reshape(self.B.shape[0], *self.A.shape[1:])
            total = product if total is None else product + total.reshape(product.shape)
        return total


def in_diffusers_layout(keys: Iterable[str]) -> bool:
    """Whether a LoRA file spells modules as diffusers does (decides what `norm2` means)."""
    return any(mark in key for key in keys for mark in _DIFFUSERS_MARKS)


def lora_key(key: str, diffusers_layout: bool) -> tuple[str, str] | None:
    """`(diffusers module, role)` of a LoRA key; None when it is no Wan LoRA key.

    Roles: `A`, `B`, `alpha`, `diff`, `diff_b`.
    """
    for ending, role in _ENDINGS:
        match = ending.search(key)
        if match:
            module = module_name(key[: match.start()], diffusers_layout)
            return (module, role) if module else None
    return None


def module_name(name: str, diffusers_layout: bool) -> str | None:
    """Diffusers name of a module as a LoRA file spells it, None when Wan has no such module."""
    flat = _FLAT_PREFIX.sub("", name)
    if flat != name:
        return names.unflatten(flat)
    stripped = True
    while stripped:
        stripped = False
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name, stripped = name[len(prefix) :], True
    if not diffusers_layout or not names.is_module(name):
        name = names.to_diffusers(name) or name
    return name if names.is_module(name) else None


def read_lora(source: str | Path | Mapping[str, torch.Tensor]) -> dict[str, LoraPair]:
    """Read a LoRA.

    Args:
        source: a `.safetensors` file, a PEFT folder, or a state dict.

    Returns:
        Diffusers module name -> its pair, sorted by name; tensors in fp32 on the CPU.

    Raises:
        FlashGRPOError: keys that name no Wan module or an adapter type that cannot be merged
            (listed), half a pair, ranks that do not agree, values that are not finite.
    """
    if isinstance(source, Mapping):
        return _collect("LoRA", list(source), source.__getitem__, {})
    file = open_tensors(source)
    return _collect(str(file.path), file.keys(), file.get, header_settings(file))


def _collect(
    label: str,
    keys: list[str],
    get: Callable[[str], torch.Tensor],
    settings: dict[str, Any],
) -> dict[str, LoraPair]:
    parts: dict[str, dict[str, torch.Tensor]] = {}
    unmatched = []
    diffusers_layout = in_diffusers_layout(keys)
    for key in sorted(keys):
        found = lora_key(key, diffusers_layout)
        if found is None:
            unmatched.append(key)
            continue
        module, role = found
        if role in parts.setdefault(module, {}):
            raise FlashGRPOError(
                f"{label}: module `{module}` has two `{role}` entries, one is `{key}`; "
                "keep one naming scheme in the file"
            )
        tensor = get(key).detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise FlashGRPOError(
                f"{label}: `{key}` holds values that are not finite; use another checkpoint"
            )
        parts[module][role] = tensor
    if unmatched:
        raise _unmatched_error(label, unmatched, len(keys))
    if not parts:
        raise FlashGRPOError(f"{label}: no tensors; use a LoRA file")
    return {name: _pair(label, name, parts[name], settings) for name in sorted(parts)}


def _unmatched_error(label: str, unmatched: list[str], total: int) -> FlashGRPOError:
    for mark, kind in _UNSUPPORTED:
        first = next((key for key in unmatched if mark in key), None)
        if first:
            return FlashGRPOError(
                f"{label}: `{first}` is a {kind} adapter, which is not supported; use a plain LoRA"
            )
    return FlashGRPOError(
        f"{label}: {len(unmatched)} of {total} keys name no Wan module ("
        f"{shortened(unmatched)}); use a LoRA that was trained on Wan 2.1 or 2.2"
    )


def _pair(
    label: str, name: str, parts: dict[str, torch.Tensor], settings: dict[str, Any]
) -> LoraPair:
    a, b = parts.get("A"), parts.get("B")
    diff, diff_b = parts.get("diff"), parts.get("diff_b")
    if a is None and b is None:
        if diff is None and diff_b is None:
            raise FlashGRPOError(f"{label}: `{name}` has an alpha but no weights; train it again")
        return LoraPair(None, None, 0.0, diff, diff_b)
    if a is None or b is None:
        half = "lora_A (down)" if a is None else "lora_B (up)"
        raise FlashGRPOError(f"{label}: `{name}` lacks its {half}; the file is incomplete")
    if a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
        raise FlashGRPOError(
            f"{label}: `{name}` has lora_A {list(a.shape)} and lora_B {list(b.shape)}, whose "
            "ranks differ; the file is damaged"
        )
    rank = a.shape[0]
    if "alpha" in parts:
        if parts["alpha"].numel() != 1:
            raise FlashGRPOError(
                f"{label}: alpha of `{name}` has {parts['alpha'].numel()} values, expected 1; "
                "the file is damaged"
            )
        alpha = float(parts["alpha"])
    else:
        alpha = _header_alpha(name, rank, settings)
    return LoraPair(a, b, alpha, diff, diff_b)


def _header_alpha(name: str, rank: int, settings: dict[str, Any]) -> float:
    """Alpha of a module from PEFT settings, with rsLoRA's scale alpha / sqrt(r) folded in."""
    alpha = settings.get("lora_alpha")
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if name == pattern or name.endswith(f".{pattern}"):
            alpha = value
    if alpha is None:
        return float(rank)
    return float(alpha) * (math.sqrt(rank) if settings.get("use_rslora") else 1.0)


def header_settings(file: TensorFile) -> dict[str, Any]:
    """PEFT settings that travel with a LoRA: diffusers' header or PEFT's `adapter_config.json`.

    Returns:
        `lora_alpha`, `alpha_pattern`, `use_rslora`, ... or an empty dict.

    Raises:
        FlashGRPOError: unreadable settings, or an adapter type that cannot be merged.
    """
    label = str(file.path)
    text = file.metadata.get("lora_adapter_metadata")
    beside = (file.path if file.path.is_dir() else file.path.parent) / "adapter_config.json"
    try:
        if text is not None:
            raw = json.loads(text)
            settings = {key.removeprefix("transformer."): value for key, value in raw.items()}
        elif beside.is_file() and file.files[0].name.startswith("adapter_model"):
            label = str(beside)
            settings = dict(json.loads(beside.read_text(encoding="utf-8")))
        else:
            return {}
        alpha = settings.get("lora_alpha")
        if alpha is not None:
            float(alpha)
        dict(settings.get("alpha_pattern") or {})
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise FlashGRPOError(f"{label}: unreadable LoRA settings ({exc}); export it again") from exc
    if settings.get("use_dora"):
        raise FlashGRPOError(f"{label}: a DoRA adapter, which is not supported; use a plain LoRA")
    return settings
