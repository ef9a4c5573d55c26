"""The Wan VAE: load it strictly, and turn uint8 videos into normalised latents."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from ..errors import FlashGRPOError
from ..files import TensorFile, open_tensors
from .detect import kind_of
from .weights import Weights, component_folder, fill, finish, name_map

#: Latent statistics of the Wan 2.2 VAE (48 channels), as published with the model. Those of the
#: 2.1 VAE are the defaults of `AutoencoderKLWan`.
MEAN_22 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542,
    0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109,
    0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899,
    -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
STD_22 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344,
    0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804,
    0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999,
    0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip

TEMPORAL = 4  # frames per latent frame, after a first frame of its own

_OUTER = {
    "conv1.": "quant_conv.",
    "conv2.": "post_quant_conv.",
    "encoder.conv1.": "encoder.conv_in.",
    "decoder.conv1.": "decoder.conv_in.",
    "encoder.head.0.": "encoder.norm_out.",
    "decoder.head.0.": "decoder.norm_out.",
    "encoder.head.2.": "encoder.conv_out.",
    "decoder.head.2.": "decoder.conv_out.",
}
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
_INNER = {
    "residual.0.": "norm1.",
    "residual.2.": "conv1.",
    "residual.3.": "norm2.",
    "residual.6.": "conv2.",
    "shortcut.": "conv_shortcut.",
}
_RES_BLOCKS = 2  # residual blocks of an encoder stage; a decoder stage has one more


@dataclass(frozen=True)
class VaeSpec:
    """What a Wan VAE file holds.

    Attributes:
        version: `2.1` (16 channels, 8x8 pixels) or `2.2` (48 channels, 16x16 pixels).
        layout: `original` (ComfyUI) or `diffusers` key names.
        base_dim: narrowest width of the encoder.
        decoder_base_dim: narrowest width of the decoder.
        z_dim: latent channels.
    """

    version: str
    layout: str
    base_dim: int
    decoder_base_dim: int
    z_dim: int
    in_channels: int
    out_channels: int
    weight_dtype: str
    quantisation: str
    parameters: int


def to_diffusers(name: str) -> str | None:
    """Diffusers name of an original VAE parameter; None when the VAE has no such parameter."""
    for old, new in _OUTER.items():
        if name.startswith(old):
            return new + name[len(old) :]
    match = re.match(r"^(encoder|decoder)\.middle\.([012])\.(.+)$", name)
    if match:
        return f"{match[1]}.mid_block.{_MIDDLE[match[2]]}.{_inner(match[3])}"
    # 2.2: stages hold their layers; 2.1: one flat list (which diffusers keeps for the encoder).
    match = re.match(r"^encoder\.downsamples\.(\d+)\.downsamples\.(\d+)\.(.+)$", name)
    if match:
        layer = int(match[2])
        place = f"resnets.{layer}" if layer < _RES_BLOCKS else "downsampler"
        return f"encoder.down_blocks.{match[1]}.{place}.{_inner(match[3])}"
    match = re.match(r"^decoder\.upsamples\.(\d+)\.upsamples\.(\d+)\.(.+)$", name)
    if match:
        layer = int(match[2])
        place = f"resnets.{layer}" if layer <= _RES_BLOCKS else "upsampler"
        return f"decoder.up_blocks.{match[1]}.{place}.{_inner(match[3])}"
    match = re.match(r"^encoder\.downsamples\.(\d+)\.(.+)$", name)
    if match:
        return f"encoder.down_blocks.{match[1]}.{_inner(match[2])}"
    match = re.match(r"^decoder\.upsamples\.(\d+)\.(.+)$", name)
    if match:
        stage, layer = divmod(int(match[1]), _RES_BLOCKS + 2)
        place = f"resnets.{layer}" if layer <= _RES_BLOCKS else "upsamplers.0"
        return f"decoder.up_blocks.{stage}.{place}.{_inner(match[2])}"
    return None


def _inner(name: str) -> str:
    for old, new in _INNER.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name  # resample, time_conv, norm, to_qkv and proj have one name in both layouts


def detect_vae(file: TensorFile) -> VaeSpec:
    """Read the architecture of a Wan VAE from its tensor shapes.

    Raises:
        FlashGRPOError: the file is something else (named).
    """
    if "decoder.middle.0.residual.0.gamma" in file:
        layout = "original"
        residual = "decoder.upsamples.0.upsamples.0.residual.2.weight" in file
        latent, first, narrow, last = "conv2", "encoder.conv1", "decoder.head.0", "decoder.head.2"
    elif "decoder.mid_block.resnets.0.norm1.gamma" in file:
        layout = "diffusers"
        residual = "decoder.up_blocks.0.upsampler.resample.1.weight" in file
        latent, first = "post_quant_conv", "encoder.conv_in"
        narrow, last = "decoder.norm_out", "decoder.conv_out"
    else:
        raise FlashGRPOError(
            f"{file.path}: this is {kind_of(file)}, not a Wan VAE; choose wan_2.1_vae.safetensors "
            "or wan2.2_vae.safetensors from ComfyUI's vae folder"
        )
    weights = Weights(file)
    return VaeSpec(
        version="2.2" if residual else "2.1",
        layout=layout,
        base_dim=file.shape(f"{first}.weight")[0],
        decoder_base_dim=file.shape(f"{narrow}.gamma")[0],
        z_dim=file.shape(f"{latent}.weight")[0],
        in_channels=file.shape(f"{first}.weight")[1],
        out_channels=file.shape(f"{last}.weight")[0],
        weight_dtype=weights.dtype,
        quantisation=weights.quantisation,
        parameters=weights.parameters,
    )


def load_vae(
    path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> AutoencoderKLWan:
    """Load a Wan 2.1 or 2.2 VAE.

    Args:
        path: ComfyUI or Diffusers `.safetensors`, or a Diffusers folder.
        dtype: dtype of the weights; fp16 may overflow while decoding, bf16 and fp32 do not.
        device: where the weights go.

    Returns:
        The frozen VAE in eval mode; its config holds the latent mean and std.

    Raises:
        FlashGRPOError: another kind of file, unknown or missing keys (listed), wrong shapes, no
            known latent statistics.
    """
    folder = component_folder(path, "vae")
    file = open_tensors(folder)
    spec = detect_vae(file)
    vae = empty_vae(spec, _statistics(folder, spec.z_dim))
    weights = Weights(file)
    translate = to_diffusers if spec.layout == "original" else (lambda name: name)
    fill(vae, weights, name_map(weights, translate), dtype, device)
    finish(vae)
    if torch.device(device).type == "cpu":
        # With channels last the CPU's convolutions need no reordering: a fifth less time.
        for parameter in vae.parameters():
            if parameter.dim() == 5:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
    return vae


def empty_vae(spec: VaeSpec, statistics: dict[str, list[float]] | None = None) -> AutoencoderKLWan:
    """A VAE on the meta device.

    Args:
        spec: its sizes.
        statistics: latent mean and std, `latents_mean` and `latents_std`; None when only shapes
            matter.
    """
    if statistics is None:
        statistics = {"latents_mean": [0.0] * spec.z_dim, "latents_std": [1.0] * spec.z_dim}
    arguments: dict[str, Any] = {
        "base_dim": spec.base_dim,
        "decoder_base_dim": spec.decoder_base_dim,
        "z_dim": spec.z_dim,
        "in_channels": spec.in_channels,
        "out_channels": spec.out_channels,
        **statistics,
    }
    if spec.version == "2.2":
        arguments.update(is_residual=True, patch_size=2, scale_factor_spatial=16)
    with torch.device("meta"):
        vae = AutoencoderKLWan(**arguments)
    use_quick_norm(vae)
    return vae


def use_quick_norm(vae: AutoencoderKLWan) -> None:
    """Replace the channel norms' forward by `_channel_rms_norm`."""
    for module in vae.modules():
        if type(module).__name__ == "WanRMS_norm" and module.channel_first:
            module.forward = MethodType(_channel_rms_norm, module)


def _channel_rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The VAE's channel norm of `[B, C, ...]`, in a form that is quick on the CPU.

    The library's own takes the vector norm over a strided dimension, which is a third of the
    decoding time there; a plain sum of squares is the same number. Computed in fp32 at least.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    norm = wide.square().sum(1, keepdim=True).sqrt_().clamp_min_(1e-12)
    return (wide / norm).to(x.dtype) * (self.scale * self.gamma) + self.bias


def _statistics(folder: Path, z_dim: int) -> dict[str, list[float]]:
    """Latent mean and std, from the `config.json` of a Diffusers folder or the published ones."""
    config = folder / "config.json"
    if folder.is_dir() and config.is_file():
        try:
            settings = json.loads(config.read_text(encoding="utf-8"))
            given = {key: settings.get(key) for key in ("latents_mean", "latents_std")}
            if all(given.values()):
                found = {key: [float(value) for value in values] for key, values in given.items()}
                if any(len(values) != z_dim for values in found.values()):
                    raise ValueError(f"latent statistics are not {z_dim} long")
                return found
        except (OSError, ValueError, TypeError, AttributeError) as exc:
            raise FlashGRPOError(
                f"{config}: not readable ({exc}); download the folder again"
            ) from exc
    if z_dim == len(MEAN_22):
        return {"latents_mean": list(MEAN_22), "latents_std": list(STD_22)}
    if z_dim == 16:
        return {}
    raise FlashGRPOError(
        f"{folder}: no latent statistics are known for {z_dim} channels; use a Wan VAE with 16 or "
        "48 channels, or a Diffusers folder whose config.json has latents_mean and latents_std"
    )


def latent_statistics(
    vae: AutoencoderKLWan, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the latents per channel, fp32 `[1, C, 1, 1, 1]`."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, dtype=torch.float32, device=device)
    std = torch.tensor(vae.config.latents_std, dtype=torch.float32, device=device)
    return mean.reshape(shape), std.reshape(shape)


@torch.no_grad()
def encode_video(vae: AutoencoderKLWan, video: np.ndarray) -> torch.Tensor:
    """Latents of videos, the mode of the posterior, normalised as the transformer expects them.

    Args:
        vae: from `load_vae`.
        video: uint8 `[B, T, H, W, 3]`, T = 4n + 1, H and W multiples of the VAE's factor.

    Returns:
        `(z - mean) / std`, fp32 `[B, C, 1 + (T - 1) / 4, H / 8, W / 8]` on the VAE's device.

    Raises:
        FlashGRPOError: a shape that the VAE cannot take.
    """
    factor = vae.config.scale_factor_spatial
    if video.dtype != np.uint8 or video.ndim != 5 or video.shape[-1] != 3:
        raise FlashGRPOError(
            f"video is {video.dtype} {list(video.shape)}; pass uint8 [B, T, H, W, 3]"
        )
    _, frames, height, width, _ = video.shape
    if frames % TEMPORAL != 1 or height % factor or width % factor:
        raise FlashGRPOError(
            f"video of {frames} frames, {width}x{height}: use 4n+1 frames and sides that are "
            f"multiples of {factor}"
        )
    pixels = torch.from_numpy(np.ascontiguousarray(video)).to(next(vae.parameters()).device)
    return encode_pixels(vae, pixels.permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0)


@torch.no_grad()
def encode_pixels(vae: AutoencoderKLWan, pixels: torch.Tensor) -> torch.Tensor:
    """Normalised latents as by `encode_video`, of pixels `[B, 3, T, H, W]` in [-1, 1]."""
    parameter = next(vae.parameters())
    z = vae.encode(pixels.to(parameter.device, parameter.dtype)).latent_dist.mode().float()
    mean, std = latent_statistics(vae, z.device)
    return (z - mean) / std
