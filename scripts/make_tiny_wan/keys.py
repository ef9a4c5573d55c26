"""Write the models in the original (ComfyUI) key layout."""

from __future__ import annotations

import torch
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)

from flashgrpo_core.wan.names import to_original

State = dict[str, torch.Tensor]

_RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3"} | {
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_OUTER = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"}


def transformer_to_original(state: State) -> State:
    """Rename a diffusers ``WanTransformer3DModel`` state; the inverse is diffusers' own."""
    renamed = {}
    for name, tensor in state.items():
        original = to_original(name)
        if original is None:
            raise KeyError(f"{name} has no name in the original layout")
        renamed[original] = tensor
    _check(convert_wan_transformer_to_diffusers(dict(renamed)), state)
    return renamed


def vae_to_original(state: State) -> State:
    """Rename a diffusers ``AutoencoderKLWan`` state (Wan 2.1 layout)."""
    renamed = {_vae_name(name): tensor for name, tensor in state.items()}
    _check(convert_wan_vae_to_diffusers(dict(renamed)), state)
    return renamed


def _vae_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] in ("quant_conv", "post_quant_conv"):
        return ".".join([{"quant_conv": "conv1", "post_quant_conv": "conv2"}[parts[0]], parts[1]])
    side, block, rest = parts[0], parts[1], parts[2:]
    if block in _OUTER:
        return ".".join([side, _OUTER[block], *rest])
    if block == "mid_block":  # resnet, attention, resnet = middle 0, 1, 2
        if rest[0] == "attentions":
            return ".".join([side, "middle.1", *rest[2:]])
        return ".".join([side, f"middle.{2 * int(rest[1])}", _RESIDUAL[rest[2]], *rest[3:]])
    if block == "down_blocks":  # a flat list in both layouts
        inner = [_RESIDUAL.get(rest[1], rest[1]), *rest[2:]]
        return ".".join([side, f"downsamples.{rest[0]}", *inner])
    # Up-blocks hold three resnets and an upsampler; the original numbers them through.
    first = 4 * int(rest[0])
    if rest[1] == "upsamplers":
        return ".".join([side, f"upsamples.{first + 3}", *rest[3:]])
    inner = [_RESIDUAL[rest[3]], *rest[4:]]
    return ".".join([side, f"upsamples.{first + int(rest[2])}", *inner])


def _check(back: State, state: State) -> None:
    """Raise unless diffusers' conversion of the renamed tensors gives the same state again."""
    if back.keys() != state.keys():
        raise KeyError(f"names do not round-trip: {sorted(back.keys() ^ state.keys())[:6]}")
    for name, tensor in state.items():
        if not torch.equal(back[name], tensor):
            raise ValueError(f"{name} changed in the round trip")
