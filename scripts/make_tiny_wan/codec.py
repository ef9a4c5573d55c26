"""Synthetic training clips and the linear patch codec that the VAE is taught first.

Reconstruction alone teaches a VAE of this size slowly and loses the colours. So the latent space
is fixed beforehand, by principal components of the pixels, and encoder and decoder learn it
separately: one latent cell stands for an 8x8 patch of the first frame, or for a 4x8x8 block of
every later latent frame, and holds its 16 first components.

The components are half-whitened (divided by the fourth root of their variance), so that
the small ones, which carry the motion, are not lost in the encoder's error, and then rotated by a
Hadamard matrix, which gives all 16 channels the same variance as Wan's normalised latents have.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from flashgrpo_core import tiny_world

CHANNELS = 16
PATCH = 8


def render_clips(count: int, seed: int, anywhere: bool = False) -> tuple[torch.Tensor, list[str]]:
    """Render ``count`` clips that go through all 72 captions in turn.

    Args:
        count: number of clips.
        seed: of place, size, speed and shades.
        anywhere: from the wider ranges that the VAE is taught with.

    Returns:
        uint8 clips [N, 9, 64, 64, 3] and their (true) captions.
    """
    rng = np.random.default_rng(seed)
    prompts = tiny_world.all_prompts()
    captions = [prompts[i % len(prompts)] for i in range(count)]
    clips = np.stack(
        [
            tiny_world.render_clip(*tiny_world.parse_prompt(c), rng, anywhere=anywhere)
            for c in captions
        ]
    )
    return torch.from_numpy(clips), captions


def to_pixels(clips: torch.Tensor) -> torch.Tensor:
    """uint8 [B, T, H, W, 3] to the VAE's float [B, 3, T, H, W] in -1..1."""
    return clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0


def _blocks(pixels: torch.Tensor, frames: int) -> torch.Tensor:
    """Cut [B, 3, T, H, W] into [B, T/frames, H/8, W/8, 3*frames*64] blocks."""
    b, c, t, h, w = pixels.shape
    cut = pixels.reshape(b, c, t // frames, frames, h // PATCH, PATCH, w // PATCH, PATCH)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)


def _hadamard() -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < CHANNELS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / CHANNELS**0.5


class PatchCodec:
    """Linear map from pixel blocks to 16 latent channels of mean 0 and variance 1."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def fit(cls, clips: torch.Tensor) -> PatchCodec:
        """Fit means and bases on uint8 clips [N, 9, 64, 64, 3]."""
        pixels = to_pixels(clips)
        tensors = {}
        for name, part, frames in (("first", pixels[:, :, :1], 1), ("later", pixels[:, :, 1:], 4)):
            blocks = _blocks(part, frames).flatten(0, 3).double()
            mean = blocks.mean(0)
            covariance = (blocks - mean).T @ (blocks - mean) / len(blocks)
            variance, vectors = torch.linalg.eigh(covariance)
            variance, vectors = variance.flip(0)[:CHANNELS], vectors.flip(1)[:, :CHANNELS]
            vectors = vectors * vectors.sum(0).sign()  # an eigenvector's sign is arbitrary
            # Variance after half-whitening is sqrt(v); the rotation averages it over channels.
            basis = vectors * variance**-0.25 @ _hadamard().double()
            tensors[f"{name}.mean"] = mean.float()
            tensors[f"{name}.basis"] = (basis / variance.sqrt().mean().sqrt()).float()
        return cls(tensors)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, 4k+1, H, W] in -1..1 to normalised latents [B, 16, k+1, H/8, W/8]."""
        t = self.tensors
        first = (_blocks(pixels[:, :, :1], 1) - t["first.mean"]) @ t["first.basis"]
        later = (_blocks(pixels[:, :, 1:], 4) - t["later.mean"]) @ t["later.basis"]
        return torch.cat([first, later], 1).permute(0, 4, 1, 2, 3).contiguous()

    def save(self, path: Path) -> None:
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, path)

    @classmethod
    def load(cls, path: Path) -> PatchCodec:
        return cls(load_file(path))
