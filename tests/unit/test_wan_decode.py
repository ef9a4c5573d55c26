"""Decoding piece by piece and tile by tile: the same video, less memory, and what tiles cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from flashgrpo_core import embedded
from flashgrpo_core.wan.decode import (
    decode_frames,
    decode_latents,
    tiles,
    to_bytes,
    use_tiles,
)
from flashgrpo_core.wan.vae import encode_video, latent_statistics, load_vae
from tests.unit._memory import peak_bytes
from tests.unit.test_wan_vae import build


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_frame_by_frame_is_what_the_library_decodes_at_once(version: str) -> None:
    vae = build(version)
    z = torch.randn(2, vae.config.z_dim, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pieces = [piece.clamp(-1, 1) for piece in decode_frames(vae, z)]
        assert [piece.shape[2] for piece in pieces] == [1, 4, 4]
        assert torch.equal(torch.cat(pieces, 2), vae.decode(z).sample)


FRAMES, SIDE = 9, 128


def scene() -> np.ndarray:
    """A video with structure at the scale of the tiles' seams."""
    y, x = np.mgrid[:SIDE, :SIDE] / 16.0
    frames = [
        np.stack([np.sin(x + t / 4), np.cos(y - t / 8) * np.sin(x / 3), np.sin((x + y) / 2)], -1)
        for t in range(FRAMES)
    ]
    return ((np.stack(frames) + 1) * 127.5).round().astype(np.uint8)[None]


@pytest.fixture(scope="module")
def tiny() -> tuple[AutoencoderKLWan, torch.Tensor]:
    vae = load_vae(embedded.TINY_VAE, torch.float32)
    return vae, encode_video(vae, scene())


def test_pieces_and_tiles_take_less_memory(tiny: tuple[AutoencoderKLWan, torch.Tensor]) -> None:
    vae, latents = tiny
    mean, std = latent_statistics(vae, latents.device)
    found: dict[str, np.ndarray] = {}

    def at_once() -> None:
        with torch.no_grad():
            found["at once"] = to_bytes(vae.decode(latents * std + mean).sample)

    def in_pieces(name: str, tile: int) -> None:
        use_tiles(vae, tile)
        found[name] = decode_latents(vae, latents)

    try:
        peaks = {
            "at once": peak_bytes(at_once),
            "pieces": peak_bytes(lambda: in_pieces("pieces", 0)),
            "tiles": peak_bytes(lambda: in_pieces("tiles", 64)),
        }
        in_pieces("one tile", SIDE)
    finally:
        use_tiles(vae, 0)
    pixels = FRAMES * SIDE * SIDE * 3 * 4  # the video in fp32
    assert np.array_equal(found["pieces"], found["at once"])
    assert np.array_equal(found["one tile"], found["at once"])
    assert peaks["at once"] - peaks["pieces"] >= 0.5 * pixels
    # The features of a quarter of the frame, and in host memory the video that is put together.
    assert peaks["tiles"] - pixels <= 0.4 * peaks["pieces"]
    # A tile of 64 pixels is 8 latents: at 256 pixels and more the seams are rarer and fainter.
    error = np.abs(found["tiles"].astype(int) - found["at once"].astype(int))
    assert 0 < error.mean() <= 3.0


@pytest.mark.parametrize("length", [8, 9, 14, 15, 40])
def test_tiles_cover_every_pixel_once_in_sum(length: int) -> None:
    found = tiles(length, 64, 8)
    total = torch.zeros(length * 8)
    for first, share in found:
        assert len(share) == 64
        assert (share > 0).all()
        total[first * 8 : first * 8 + 64] += share
    torch.testing.assert_close(total, torch.ones(length * 8))
    assert len(found) == {8: 1, 9: 2, 14: 2, 15: 3, 40: 7}[length]
    # A step at a seam is faded: neighbouring pixels of a share differ by little.
    assert max(float(share.diff().abs().max()) for _, share in found) <= 1 / 8
