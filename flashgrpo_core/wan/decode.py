"""Decode latents into videos, holding only a piece of them in floating point.

The Wan VAE is causal in time: its decoder carries the last frames of each layer from one latent
frame to the next. So a video is decoded latent frame by latent frame, and each piece becomes bytes
in host memory before the next is made. That is exact. What then peaks are the features of one
latent frame, which are as large as the frame is; tiles bound them, at the price of pixels that
differ a little: the decoder's attention no longer sees the whole frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch

from ..errors import FlashGRPOError, NotFinite
from .vae import TEMPORAL, latent_statistics

#: Neighbouring tiles share this part of their side.
OVERLAP = 0.25


def use_tiles(vae: Any, side: int) -> None:
    """Let `decode_latents` decode in tiles of `side` pixels, a multiple of 64; 0 = whole frames.

    The library's own switch would tile encoding too, and a start image must stay what it is.
    """
    vars(vae)["decode_tile"] = side


@torch.no_grad()
def decode_latents(vae: Any, latents: torch.Tensor) -> np.ndarray:
    """Videos of normalised latents.

    Args:
        vae: from `load_vae`; decodes in tiles after `use_tiles`.
        latents: normalised, `[B, C, t, h, w]`, any float dtype and device.

    Returns:
        uint8 `[B, 4 (t - 1) + 1, 8 h, 8 w, 3]`, `clamp((x + 1) / 2, 0, 1) * 255` rounded.

    Raises:
        FlashGRPOError: wrong number of channels, or the result is not finite (`NotFinite` when the
            latents are not).
    """
    video, start = np.empty(0, np.uint8), 0
    for piece in decode_pieces(vae, latents):
        if start == 0:
            frames = TEMPORAL * (latents.shape[2] - 1) + 1
            video = np.empty((len(piece), frames, *piece.shape[2:]), np.uint8)
        video[:, start : start + piece.shape[1]] = piece
        start += piece.shape[1]
        del piece  # before the next one is decoded
    return video


def decode_pieces(vae: Any, latents: torch.Tensor) -> Iterator[np.ndarray]:
    """What `decode_latents` returns, a few frames `[B, T, 8 h, 8 w, 3]` at a time.

    Call it without gradients; `no_grad` around a generator would hold each piece during the next.
    """
    if latents.ndim != 5 or latents.shape[1] != vae.config.z_dim:
        raise FlashGRPOError(
            f"latents {list(latents.shape)} do not fit a VAE with {vae.config.z_dim} channels; "
            "use the VAE that belongs to the model (Wan 2.1: 16, Wan 2.2 5B: 48 channels)"
        )
    parameter = next(vae.parameters())
    z = latents.to(parameter.device, torch.float32)
    if not bool(torch.isfinite(z).all()):
        raise NotFinite("the transformer's latents hold NaN")
    mean, std = latent_statistics(vae, z.device)
    z = (z * std + mean).to(parameter.dtype)
    frames, height, width = z.shape[2:]
    factor = vae.config.scale_factor_spatial or 8
    size = (TEMPORAL * (frames - 1) + 1, height * factor, width * factor)
    tile = vars(vae).get("decode_tile", 0)
    for pixels in _tiled(vae, z, tile, factor, size) if tile else decode_frames(vae, z):
        yield to_bytes(pixels, parameter.dtype)


def decode_frames(vae: Any, z: torch.Tensor) -> Iterator[torch.Tensor]:
    """Decode `[B, C, t, h, w]` latent frame by latent frame.

    Yields:
        Pixels `[B, 3, 1, H, W]` of the first latent frame, then `[B, 3, 4, H, W]`, about [-1, 1].
    """
    convolutions = sum(type(m).__name__ == "WanCausalConv3d" for m in vae.decoder.modules())
    carried: list[Any] = [None] * convolutions  # last frames of each layer's input
    z = vae.post_quant_conv(z)
    for i in range(z.shape[2]):
        pixels = vae.decoder(
            z[:, :, i : i + 1], feat_cache=carried, feat_idx=[0], first_chunk=i == 0
        )
        patch = vae.config.patch_size or 1
        if patch > 1:  # 2.2: channels hold the pixels of 2x2 patches, columns before rows
            pixels = pixels.unflatten(1, (-1, patch, patch))  # [B, 3, q, p, T, h, w]
            pixels = pixels.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)
        yield pixels


def to_bytes(pixels: torch.Tensor, computed: torch.dtype = torch.float32) -> np.ndarray:
    """Pixels `[B, 3, T, H, W]`, -1 to 1, as uint8 `[B, T, H, W, 3]` in host memory.

    Raises:
        FlashGRPOError: not finite; `computed` is the type that the VAE computed in.
    """
    pixels = pixels.float()
    if not bool(torch.isfinite(pixels).all()):
        raise FlashGRPOError(
            f"the decoded video holds NaN although its latents do not: the VAE runs in "
            f"{str(computed).removeprefix('torch.')}, use fp32 or bf16, or get its file again"
        )
    pixels = ((pixels + 1.0) / 2.0).clamp_(0.0, 1.0).mul_(255.0).round_().to(torch.uint8)
    return pixels.permute(0, 2, 3, 4, 1).cpu().numpy()


def _tiled(
    vae: Any, z: torch.Tensor, tile: int, factor: int, size: tuple[int, int, int]
) -> Iterator[torch.Tensor]:
    """The whole video in one piece, put together in host memory from tiles that fade over."""
    rows, columns = tiles(z.shape[3], tile, factor), tiles(z.shape[4], tile, factor)
    if len(rows) == len(columns) == 1:
        yield from decode_frames(vae, z)
        return
    whole = torch.zeros(len(z), 3, *size)
    for (top, down), (left, across) in product(rows, columns):
        height, width = len(down) // factor, len(across) // factor
        share = down[:, None] * across  # [H, W] of the tile
        part = z[:, :, :, top : top + height, left : left + width]
        area = whole[..., top * factor :, left * factor :][..., : len(down), : len(across)]
        start = 0
        for pixels in decode_frames(vae, part):
            stop = start + pixels.shape[2]
            area[:, :, start:stop] += pixels.float().cpu() * share
            start = stop
    yield whole


def tiles(length: int, side: int, factor: int) -> list[tuple[int, torch.Tensor]]:
    """Cut one side of a frame into tiles.

    Args:
        length: latents along the side.
        side: pixels of a tile, a multiple of four times `factor`.
        factor: pixels of a latent.

    Returns:
        Of each tile: its first latent, and the share that each of its pixels has in the frame. The
        shares rise and fall linearly where tiles overlap, and sum to 1 at every pixel.
    """
    side = side // factor
    stride = round(side * (1 - OVERLAP))
    if length <= side:
        return [(0, torch.ones(length * factor))]
    starts = [*range(0, length - side, stride), length - side]
    shares = torch.zeros(len(starts), length * factor)
    ramp = (torch.arange(side * factor) + 0.5) / ((side - stride) * factor)
    for row, first in zip(shares, starts, strict=True):
        rising = ramp if first > 0 else torch.ones_like(ramp)
        falling = ramp.flip(0) if first < length - side else torch.ones_like(ramp)
        part = torch.minimum(torch.minimum(rising, falling), torch.ones(()))
        row[first * factor : (first + side) * factor] = part
    shares /= shares.sum(0)
    return [
        (first, row[first * factor : (first + side) * factor])
        for row, first in zip(shares, starts, strict=True)
    ]
