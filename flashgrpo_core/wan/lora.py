"""LoRA of a Wan transformer: which modules, how it is written, how it is merged.

Names inside the core are diffusers module names (`blocks.0.attn1.to_q`); every file format is
translated from and to them. All three formats are exact at strength 1.0, and differ in who reads
them:

- `comfyui`: ComfyUI and diffusers. The default.
- `kohya`: ComfyUI; diffusers only when attention *and* ffn of every block are in the file.
- `diffusers`: diffusers only; needs the header of `export_metadata`, else alpha counts as rank.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

import torch
from torch import nn

from ..errors import FlashGRPOError
from . import names
from .describe import describe, lora_metadata
from .lora_read import LoraPair, lora_key, read_lora
from .storage import StoredLinear
from .weights import shortened

__all__ = [
    "LORA_FORMATS",
    "LoraPair",
    "describe",
    "export_lora",
    "export_metadata",
    "lora_key",
    "lora_metadata",
    "merge_lora",
    "read_lora",
    "target_modules",
]

log = logging.getLogger(__name__)

LORA_FORMATS = ("comfyui", "kohya", "diffusers")

_GROUPS: dict[str, tuple[str, ...]] = {
    "attention": tuple(
        f"{attention}.{part}"
        for attention in ("attn1", "attn2")
        for part in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    "ffn": ("ffn.net.0.proj", "ffn.net.2"),
}


def target_modules(transformer: nn.Module, targets: list[str]) -> list[str]:
    """Full names of the linear modules that get a LoRA.

    Args:
        transformer: a `WanTransformer3DModel`, with or without PEFT adapters.
        targets: `attention`, `ffn`, or a whole module name or its ending at a dot, in diffusers
            (`attn1.to_q`) or original (`self_attn.q`) spelling.

    Returns:
        Names in model order, each once.

    Raises:
        FlashGRPOError: no targets, or a target that matches nothing.
    """
    linear = []
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            linear.append(name.removesuffix(".base_layer"))  # the layer inside a PEFT wrapper
    if not targets:
        raise FlashGRPOError("model.lora_targets is empty; use for example attention")
    chosen: set[str] = set()
    for target in targets:
        endings = _GROUPS.get(target, (target,))
        matched = {name for name in linear if any(_ends_with(name, end) for end in endings)}
        if not matched:
            examples = ", ".join(dict.fromkeys(name for name in linear if "blocks.0." in name))
            raise FlashGRPOError(
                f"model.lora_targets: `{target}` matches no linear module; use attention, ffn or "
                f"endings of module names such as {examples or shortened(linear)}"
            )
        chosen |= matched
    return [name for name in linear if name in chosen]


def _ends_with(name: str, ending: str) -> bool:
    spellings = (name, names.to_original(name) or name)
    return any(name == ending or name.endswith(f".{ending}") for name in spellings)


def export_lora(
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]], alpha: float, fmt: str = "comfyui"
) -> dict[str, torch.Tensor]:
    """Tensors of a LoRA file that gives the trained policy at strength 1.0.

    Args:
        weights: diffusers module name -> (A `[r, in]`, B `[out, r]`).
        alpha: the policy computes `W x + alpha / r * B A x`.
        fmt: one of `LORA_FORMATS`. `diffusers` also needs the header of `export_metadata`.

    Returns:
        CPU tensors in the dtype of the weights; alphas are 0-d fp32.

    Raises:
        FlashGRPOError: unknown format, no weights, a name that is no Wan module, ranks that
            do not agree.
    """
    _check_export(weights, alpha, fmt)
    tensors: dict[str, torch.Tensor] = {}
    for name, (a, b) in weights.items():
        a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
        if fmt == "diffusers":
            tensors[f"transformer.{name}.lora_A.weight"] = a
            tensors[f"transformer.{name}.lora_B.weight"] = b
            continue
        original = names.to_original(name)
        if fmt == "kohya":
            base = f"lora_unet_{names.flatten(original or name)}"
            tensors[f"{base}.lora_down.weight"] = a
            tensors[f"{base}.lora_up.weight"] = b
        else:
            base = f"diffusion_model.{original}"
            if not (".attn" in name or ".ffn." in name):
                # diffusers refuses an alpha outside attention and ffn: fold the scale into B.
                b = (b.float() * (alpha / a.shape[0])).to(b.dtype)
                tensors[f"{base}.lora_A.weight"] = a
                tensors[f"{base}.lora_B.weight"] = b
                continue
            tensors[f"{base}.lora_A.weight"] = a
            tensors[f"{base}.lora_B.weight"] = b
        tensors[f"{base}.alpha"] = torch.tensor(float(alpha), dtype=torch.float32)
    if fmt == "kohya" and not any(".ffn." in name for name in weights):
        log.warning(
            "kohya LoRA without ffn layers: ComfyUI reads it, diffusers does not; "
            "use the comfyui format for both"
        )
    return tensors


def _check_export(
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]], alpha: float, fmt: str
) -> None:
    if fmt not in LORA_FORMATS:
        raise FlashGRPOError(f"LoRA format {fmt!r} is unknown; use {', '.join(LORA_FORMATS)}")
    if not weights:
        raise FlashGRPOError("the LoRA has no modules; train with at least one target")
    if not alpha > 0:
        raise FlashGRPOError(f"LoRA alpha {alpha} is not positive; use the alpha of the training")
    for name, (a, b) in weights.items():
        if not names.is_module(name):
            raise FlashGRPOError(
                f"`{name}` is no module of Wan; pass full diffusers names such as "
                "blocks.0.attn1.to_q"
            )
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise FlashGRPOError(
                f"`{name}`: A {list(a.shape)} and B {list(b.shape)} do not multiply; "
                "pass A [r, in] and B [out, r]"
            )


def export_metadata(
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]], alpha: float, fmt: str
) -> dict[str, str]:
    """Header entries that a LoRA file needs besides its description.

    Only `diffusers` files need any: that library takes alpha from `lora_adapter_metadata` and
    assumes alpha = rank without it.
    """
    if fmt != "diffusers":
        return {}
    ranks = {name: a.shape[0] for name, (a, _) in weights.items()}
    common = max(ranks.values())
    settings = {
        "transformer.r": common,
        "transformer.lora_alpha": float(alpha),
        "transformer.target_modules": sorted(ranks),
        "transformer.rank_pattern": {n: r for n, r in sorted(ranks.items()) if r != common},
        "transformer.alpha_pattern": {},
    }
    return {"lora_adapter_metadata": json.dumps(settings, sort_keys=True)}


@torch.no_grad()
def merge_lora(transformer: nn.Module, lora: Mapping[str, LoraPair], strength: float = 1.0) -> int:
    """Add a frozen LoRA to the base weights, in place.

    Computed in fp32 and rounded back once. Weights in 8-bit storage or host memory stay as they
    are and get the low-rank product beside them, since rounding it to 8 bits would lose most of
    it. Everything is checked before the first weight changes.

    Args:
        transformer: a `WanTransformer3DModel`, with or without PEFT adapters.
        lora: as read by `read_lora`.
        strength: factor on the whole change, as in ComfyUI.

    Returns:
        Number of modules changed.

    Raises:
        FlashGRPOError: modules that the model lacks, or shapes of another model size.
    """
    parameters = dict(transformer.named_parameters())
    changes: list[tuple[nn.Parameter, LoraPair, str]] = []
    missing = []
    for name, pair in lora.items():
        found = False
        for part in ("weight", "bias"):
            if (pair.A is None and pair.diff is None) if part == "weight" else pair.diff_b is None:
                continue
            found = True
            spellings = (f"{name}.{part}", f"{name}.base_layer.{part}")
            bare = (name,) if part == "weight" else ()  # modulation tables have no `.weight`
            parameter = next((parameters[s] for s in spellings + bare if s in parameters), None)
            if parameter is None:
                missing.append(f"{name}.{part}")
                continue
            _check_fit(name, part, parameter, pair)
            changes.append((parameter, pair, part))
        if not found:
            missing.append(name)
    if missing:
        image = any("add_k_proj" in name or "image_embedder" in name for name in missing)
        hint = "; image layers exist in Wan 2.1 image-to-video only" if image else ""
        raise FlashGRPOError(
            f"the LoRA has {len(missing)} entries that this model lacks ({shortened(missing)})"
            f"{hint}; use a LoRA made for this model"
        )
    layers = {m.weight: m for m in transformer.modules() if isinstance(m, StoredLinear)}
    for parameter, pair, part in changes:
        layer = layers.get(parameter) if part == "weight" else None
        if layer is not None and pair.A is not None and pair.B is not None and pair.diff is None:
            a, b = pair.A.flatten(1), pair.B.flatten(1)
            layer.add_low_rank(
                a.to(parameter.device), (b * pair.scale * strength).to(parameter.device)
            )
            continue
        delta = pair.delta() if part == "weight" else pair.diff_b
        if delta is not None:  # always, as selected above
            delta = delta.to(parameter.device).reshape(parameter.shape)
            if layer is not None:
                layer.add(strength * delta)
                continue
            parameter.copy_((parameter.float() + strength * delta).to(parameter.dtype))
    return len(lora)


def _check_fit(name: str, part: str, parameter: nn.Parameter, pair: LoraPair) -> None:
    shapes: list[int] = []
    if part == "bias" and pair.diff_b is not None:
        shapes.append(pair.diff_b.numel())
    if part == "weight":
        if pair.A is not None and pair.B is not None:
            shapes.append(pair.B.shape[0] * pair.A[0].numel())
            if pair.B.shape[0] != parameter.shape[0]:
                shapes.append(-1)
        if pair.diff is not None:
            shapes.append(pair.diff.numel())
    if any(count != parameter.numel() for count in shapes):
        raise FlashGRPOError(
            f"the LoRA does not fit `{name}.{part}` of shape {list(parameter.shape)}; it was "
            "made for a model of another size"
        )
