"""Train the tiny Wan transformer by flow matching on normalised latents."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from codec import PatchCodec, render_clips, to_pixels
from diffusers import WanTransformer3DModel
from optim import MuonAdam
from safetensors.torch import load_file, save_file

from flashgrpo_core import tiny_world

log = logging.getLogger("make_tiny_wan")

LAYERS = 4
SHIFT = 3.0
STEPS = 10
BATCH = 32
# Each caption's colour, and independently its direction, is replaced by a random one this often:
# the base model follows prompts imperfectly and leaves reinforcement learning something to do.
WRONG_COLOUR = 0.22
WRONG_DIRECTION = 0.22
EMA = 0.998


def new_wan(seed: int) -> WanTransformer3DModel:
    """A fresh text-to-video Wan of width 128 (one head)."""
    torch.manual_seed(seed)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=1,
        attention_head_dim=128,
        in_channels=16,
        out_channels=16,
        text_dim=4096,
        freq_dim=256,
        ffn_dim=512,
        num_layers=LAYERS,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
    )


def shifted(u: torch.Tensor) -> torch.Tensor:
    """Shift a noise level: sigma = s u / (1 + (s - 1) u)."""
    return SHIFT * u / (1.0 + (SHIFT - 1.0) * u)


@torch.no_grad()
def sample(
    model: WanTransformer3DModel, context: torch.Tensor, seeds: list[int], batch: int = 36
) -> torch.Tensor:
    """Plain Euler, 10 steps, shift 3, no guidance.

    Args:
        model: velocity model.
        context: text embeddings [N, 32, 4096].
        seeds: N seeds of the initial noise.
        batch: videos per forward pass.

    Returns:
        Normalised latents [N, 16, 3, 8, 8].
    """
    sigmas = shifted(1.0 - torch.arange(STEPS + 1) / STEPS)
    noise = [
        torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    done = []
    for x, text in zip(torch.stack(noise).split(batch), context.split(batch), strict=True):
        for now, then in zip(sigmas[:-1], sigmas[1:], strict=True):
            velocity = model(x, (now * 1000.0).expand(len(x)), text, return_dict=False)[0]
            x = x + (then - now) * velocity
        done.append(x)
    return torch.cat(done)


def make_latents(codec: PatchCodec, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Render clips and encode them; returns fp16 latents and the index of each caption."""
    parts = []
    for start in range(0, count, 720):
        clips, _ = render_clips(720, seed + start)
        parts.append(codec.encode(to_pixels(clips)).half())
    latents = torch.cat(parts)[:count]
    return {"latents": latents, "caption": torch.arange(count) % len(tiny_world.all_prompts())}


def _wrong_captions(caption: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Replace colours and directions at random; captions are (colour, shape, direction) digits."""
    colours, shapes, directions = 6, 3, 4
    colour, rest = caption // (shapes * directions), caption % (shapes * directions)
    shape, direction = rest // directions, rest % directions
    n = (len(caption),)

    def spoil(value: torch.Tensor, share: float, kinds: int) -> torch.Tensor:
        other = torch.randint(kinds, n, generator=generator)
        return torch.where(torch.rand(n, generator=generator) < share, other, value)

    colour = spoil(colour, WRONG_COLOUR, colours)
    direction = spoil(direction, WRONG_DIRECTION, directions)
    return (colour * shapes + shape) * directions + direction


def train(
    folder: Path, context: torch.Tensor, steps: int, seed: int, threads: int
) -> None:
    """Train on ``latents.safetensors``; writes the averaged weights to ``wan.safetensors``.

    Args:
        folder: work folder.
        context: embeddings of all 72 captions [72, 32, 4096].
        steps: optimiser steps.
        seed: of weights, noise and order.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    data = load_file(folder / "latents.safetensors")
    generator = torch.Generator().manual_seed(seed)
    model = new_wan(seed).train()
    text = model.condition_embedder.text_embedder.linear_1
    embedding = [*text.parameters(), *model.patch_embedding.parameters()]
    optimiser = MuonAdam(model.parameters(), steps, lr=0.01, adam_lr=2e-3, adam_only=embedding)
    averaged = {k: v.clone() for k, v in model.state_dict().items()}
    mean_loss, started = 0.0, time.time()
    for step in range(steps):
        index = torch.randint(len(data["latents"]), (BATCH,), generator=generator)
        x0 = data["latents"][index].float()
        noise = torch.randn(x0.shape, generator=generator)
        # One draw per stratum: the same distribution, less noise between batches.
        u = (torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) / BATCH
        sigma = shifted(u)
        level = sigma[:, None, None, None, None]
        captions = _wrong_captions(data["caption"][index], generator)
        velocity = model(
            (1.0 - level) * x0 + level * noise, sigma * 1000.0, context[captions], return_dict=False
        )[0]
        loss = (velocity - (noise - x0)).square().mean()
        loss.backward()
        optimiser.step()
        decay = min(EMA, (1.0 + step) / (10.0 + step))
        with torch.no_grad():
            for name, value in model.state_dict().items():
                averaged[name].lerp_(value, 1.0 - decay)
        mean_loss += (loss.item() - mean_loss) * max(0.01, 1 / (step + 1))
        if step % 100 == 99:
            rate = (time.time() - started) / (step + 1)
            log.info("wan step %d/%d  loss %.4f  %.2f s/step", step + 1, steps, mean_loss, rate)
        if step % 500 == 499 and step + 1 < steps:
            save_file(averaged, folder / "wan.partial.safetensors")
    save_file(averaged, folder / "wan.safetensors")
