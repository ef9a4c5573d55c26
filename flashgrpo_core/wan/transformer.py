"""Load a Wan diffusion model into diffusers' `WanTransformer3DModel`, strictly and in place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from ..errors import FlashGRPOError
from ..files import TensorFile, open_tensors
from . import names
from .detect import HEAD_DIM, WanSpec, detect_transformer
from .storage import store_blocks, stored_keys
from .weights import Weights, component_folder, fill, finish, name_map

#: Parts that diffusers keeps in fp32 in a 16-bit model; for versions that do not say.
_ISLANDS = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")


def load_transformer(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    storage: str = "full",
    blocks_to_swap: int = 0,
) -> tuple[WanTransformer3DModel, WanSpec]:
    """Load a Wan diffusion model.

    The model is built without memory and receives the file's tensors one by one, so the peak is
    the finished model plus one tensor.

    Args:
        path: ComfyUI or Diffusers `.safetensors` (also fp8 and fp8_scaled, which are
            dequantised), a sharded index, or a Diffusers folder.
        dtype: dtype of the weights. With a 16-bit type the parts that diffusers keeps in fp32
            (time embedder, norms, modulation tables) stay fp32.
        device: where the weights go.
        storage: `full` keeps the blocks' weights in `dtype`; `fp8` in 8 bits, as the file has
            them or rounded row by row.
        blocks_to_swap: number of blocks, from the last, whose weights rest in host memory.

    Returns:
        The frozen model in eval mode, and what the file holds.

    Raises:
        FlashGRPOError: another kind of file, unknown or missing keys (listed), wrong shapes, a
            quantisation that cannot be undone.
    """
    folder = component_folder(path, "transformer")
    file = open_tensors(folder)
    settings = diffusers_settings(folder)
    spec = detect_transformer(file, settings.get("attention_head_dim", HEAD_DIM))
    model = empty_transformer(spec, settings)
    weights = Weights(file, spec.prefix, ignore=_ignored(file, spec))
    translate = names.to_diffusers if spec.layout == "original" else (lambda name: name)
    islands = fp32_islands(model, dtype)
    mapped = name_map(weights, translate)
    stored = stored_keys(mapped, spec.num_layers, storage, blocks_to_swap)
    fill(model, weights, mapped, dtype, device, islands, later=stored)
    store_blocks(model, weights, mapped, stored, dtype, device)
    # The rotary table is computed, not stored: on the meta device it came out empty.
    model.rope = type(model.rope)(
        attention_head_dim=spec.dim // spec.num_heads,
        patch_size=spec.patch_size,
        max_seq_len=model.config.rope_max_seq_len,
    ).to(device)
    finish(model)
    return model, spec


def empty_transformer(
    spec: WanSpec, settings: Mapping[str, Any] | None = None
) -> WanTransformer3DModel:
    """A transformer on the meta device: shapes without memory.

    Args:
        spec: its sizes.
        settings: what a Diffusers `config.json` says and the weights cannot tell.
    """
    settings = settings or {}
    arguments: dict[str, Any] = {
        "patch_size": spec.patch_size,
        "num_attention_heads": spec.num_heads,
        "attention_head_dim": spec.dim // spec.num_heads,
        "in_channels": spec.in_channels,
        "out_channels": spec.out_channels,
        "text_dim": spec.text_dim,
        "freq_dim": spec.freq_dim,
        "ffn_dim": spec.ffn_dim,
        "num_layers": spec.num_layers,
        "cross_attn_norm": spec.cross_attn_norm,
        "qk_norm": "rms_norm_across_heads",
        "eps": settings.get("eps", 1e-6),
        "image_dim": spec.image_dim,
        "added_kv_proj_dim": spec.added_kv_proj_dim,
        "rope_max_seq_len": settings.get("rope_max_seq_len", 1024),
        "pos_embed_seq_len": spec.pos_embed_seq_len,
    }
    with torch.device("meta"):
        return WanTransformer3DModel(**arguments)


def fp32_islands(model: WanTransformer3DModel, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of a dotted parameter name that stay fp32 when the weights have `dtype`."""
    if dtype.itemsize >= 4:
        return ()
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or _ISLANDS)


def _ignored(file: TensorFile, spec: WanSpec) -> list[str]:
    """Weights that Wan checkpoints in Diffusers layout may carry although nothing uses them."""
    if spec.layout != "diffusers":
        return []
    names_ = (key[len(spec.prefix) :] for key in file.keys() if key.startswith(spec.prefix))
    return [name for name in names_ if ".norm_added_q." in name]


def diffusers_settings(folder: Path) -> dict[str, Any]:
    """The `config.json` beside a Diffusers checkpoint: only what the weights cannot tell."""
    if folder.name.endswith(".index.json"):
        folder = folder.parent
    config = folder / "config.json"
    if not folder.is_dir() or not config.is_file():
        return {}
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
        kind = settings.get("_class_name", "WanTransformer3DModel")
    except (OSError, ValueError, AttributeError) as exc:
        raise FlashGRPOError(f"{config}: not readable ({exc}); download the folder again") from exc
    if kind != "WanTransformer3DModel":
        raise FlashGRPOError(
            f"{config}: the folder holds a {kind}, not a WanTransformer3DModel; choose the "
            "transformer folder of a Wan text-to-video or image-to-video model"
        )
    head_dim = settings.get("attention_head_dim", HEAD_DIM)
    if not isinstance(head_dim, int) or head_dim < 1:
        raise FlashGRPOError(
            f"{config}: attention_head_dim {head_dim!r} is not a positive number; "
            "download the folder again"
        )
    return settings
