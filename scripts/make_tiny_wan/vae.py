"""Train the tiny Wan VAE: encoder and decoder learn the patch codec, each in its own process."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from codec import PatchCodec, render_clips, to_pixels
from diffusers import AutoencoderKLWan
from optim import MuonAdam
from safetensors.torch import load_file, save_file

log = logging.getLogger("make_tiny_wan")

CROP = 32
LATENT_NOISE = 0.05  # the decoder has to forgive the small errors of sampled latents
LOG_VARIANCE = -12.0  # the posterior's log-variance: practically deterministic


def new_vae(seed: int) -> AutoencoderKLWan:
    """A fresh VAE whose residual and attention branches start at zero (it learns faster so)."""
    torch.manual_seed(seed)
    vae = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2)
    for module in vae.modules():
        if type(module).__name__ == "WanResidualBlock":
            torch.nn.init.zeros_(module.conv2.weight)
            torch.nn.init.zeros_(module.conv2.bias)
        elif type(module).__name__ == "WanAttentionBlock":
            torch.nn.init.zeros_(module.proj.weight)
            torch.nn.init.zeros_(module.proj.bias)
    return vae


def encode_raw(vae: AutoencoderKLWan, pixels: torch.Tensor) -> torch.Tensor:
    """Encoder output [B, 32, t, h, w] before ``quant_conv`` (mean rows first)."""
    vae.clear_cache()
    parts = []
    for k in range(1 + (pixels.shape[2] - 1) // 4):
        chunk = pixels[:, :, :1] if k == 0 else pixels[:, :, 4 * k - 3 : 4 * k + 1]
        vae._enc_conv_idx = [0]
        parts.append(vae.encoder(chunk, feat_cache=vae._enc_feat_map, feat_idx=vae._enc_conv_idx))
    vae.clear_cache()
    return torch.cat(parts, 2)


def decode_raw(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Decoder output without ``post_quant_conv`` and without the clamp, which kills gradients."""
    vae.clear_cache()
    parts = []
    for k in range(latents.shape[2]):
        vae._conv_idx = [0]
        parts.append(
            vae.decoder(latents[:, :, k : k + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx)
        )
    vae.clear_cache()
    return torch.cat(parts, 2)


class Batches:
    """Draws training clips: mostly crops around the shape, every third time whole frames."""

    def __init__(self, clips: torch.Tensor, seed: int) -> None:
        self.clips = clips
        self.generator = torch.Generator().manual_seed(seed)
        lit = (clips.amax(-1) > 120).any(1)  # [N, H, W]: where the shape passes
        rows, columns = lit.any(2).float(), lit.any(1).float()  # [N, H], [N, W]
        at = torch.arange(lit.shape[1]).float()
        self.centres = torch.stack([(m * at).sum(1) / m.sum(1) for m in (rows, columns)], 1)
        self.count = 0

    def draw(self, crops: int) -> torch.Tensor:
        """uint8 [crops, 9, 32, 32, 3], or a quarter as many whole clips [.., 64, 64, 3]."""
        self.count += 1
        whole = self.count % 3 == 0
        size = max(1, crops // 4) if whole else crops
        index = torch.randint(len(self.clips), (size,), generator=self.generator)
        if whole:
            return self.clips[index]
        jitter = torch.rand(size, 2, generator=self.generator) * 2 - 1
        # Crops lie on the 8-pixel grid of the latent cells.
        corner = ((self.centres[index] - CROP / 2) / 8 + jitter).round().clamp(0, 4).long() * 8
        return torch.stack(
            [
                self.clips[i, :, y : y + CROP, x : x + CROP]
                for i, (y, x) in zip(index.tolist(), corner.tolist(), strict=True)
            ]
        )


def train_part(part: str, folder: str, steps: int, crops: int, seed: int) -> None:
    """Train ``encoder`` or ``decoder`` on one core and save its weights in ``folder``.

    The encoder learns pixels -> codec latents, the decoder (noisy) codec latents -> pixels.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    codec = PatchCodec.load(Path(folder) / "codec.safetensors")
    clips, _ = render_clips(2160, seed, anywhere=True)
    batches = Batches(clips, seed)
    vae = new_vae(seed)
    network = getattr(vae, part)
    optimiser = MuonAdam(network.parameters(), steps)
    average, started = 0.0, time.time()
    for step in range(steps):
        pixels = to_pixels(batches.draw(crops))
        latents = codec.encode(pixels)
        if part == "encoder":
            error = encode_raw(vae, pixels)[:, :16] - latents
            loss = error.square().mean()
        else:
            noise = torch.randn(latents.shape, generator=batches.generator)
            error = decode_raw(vae, latents + LATENT_NOISE * noise) - pixels
            # The absolute error keeps edges sharp where the squared error is content.
            loss = error.square().mean() + 0.05 * error.abs().mean()
        loss.backward()
        optimiser.step()
        average += (error.detach().square().mean().item() - average) * max(0.03, 1 / (step + 1))
        if step % 50 == 49:
            rate = (time.time() - started) / (step + 1)
            log.info("%s step %d/%d  mse %.5f  %.2f s/step", part, step + 1, steps, average, rate)
        if step % 100 == 99 or step + 1 == steps:
            name = f"{part}.safetensors" if step + 1 == steps else f"{part}.partial.safetensors"
            save_file(network.state_dict(), Path(folder) / name)


def assemble(folder: Path) -> AutoencoderKLWan:
    """Put encoder and decoder together and fold Wan's latent statistics into the 1x1x1 convs.

    The latents of an encoded clip of the world then have Wan 2.1's per-channel mean and standard
    deviation, and ``(z - mean) / std`` has mean 0 and variance 1, as the Wan was taught.
    """
    vae = new_vae(0)
    vae.encoder.load_state_dict(load_file(folder / "encoder.safetensors"))
    vae.decoder.load_state_dict(load_file(folder / "decoder.safetensors"))
    vae.eval().requires_grad_(False)
    clips, _ = render_clips(144, 5)
    with torch.no_grad():
        raw = torch.cat([encode_raw(vae, to_pixels(c))[:, :16] for c in clips.split(16)])
    raw_mean, raw_std = raw.mean((0, 2, 3, 4)), raw.std((0, 2, 3, 4))
    mean = torch.tensor(vae.config.latents_mean)
    std = torch.tensor(vae.config.latents_std)
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight.zero_()
    quant.bias.fill_(LOG_VARIANCE)
    quant.weight[range(16), range(16), 0, 0, 0] = std / raw_std
    quant.bias[:16] = mean - raw_mean * std / raw_std
    # The decoder was taught on the codec's latents; see `make_latents` for its mean and std.
    codec = load_file(folder / "latents.safetensors")
    post.weight.zero_()
    post.weight[range(16), range(16), 0, 0, 0] = codec["std"] / std
    post.bias.copy_(codec["mean"] - mean * codec["std"] / std)
    return vae
