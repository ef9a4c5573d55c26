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
# Each caption's colour, and independently its direction, is replaced by a random one this often.
# The model first learns the world from mostly true captions. A short second training with many
# wrong ones lets it follow prompts imperfectly: something for reinforcement learning to do.
WRONG_FIRST = 0.15
WRONG_SECOND = 0.28
EMA = 0.998
LR_FIRST = 0.03
LR_SECOND = 0.01


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
    """Render clips of the world and encode them with the codec.

    Returns:
        ``latents`` fp16 [N, 16, 3, 8, 8], mean 0 and variance 1 per channel; ``mean`` and
        ``std`` [16] of the codec's output, from which they were normalised; ``caption`` [N], the
        index of each caption.
    """
    parts = []
    for start in range(0, count, 720):
        clips, _ = render_clips(720, seed + start)
        parts.append(codec.encode(to_pixels(clips)))
    latents = torch.cat(parts)[:count]
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    latents = (latents - mean.view(16, 1, 1, 1)) / std.view(16, 1, 1, 1)
    caption = torch.arange(count) % len(tiny_world.all_prompts())
    return {"latents": latents.half(), "mean": mean, "std": std, "caption": caption}


def _wrong_captions(
    caption: torch.Tensor, wrong: float, generator: torch.Generator
) -> torch.Tensor:
    """Replace colours and directions at random; captions are (colour, shape, direction) digits."""
    colours, shapes, directions = 6, 3, 4
    colour, rest = caption // (shapes * directions), caption % (shapes * directions)
    shape, direction = rest // directions, rest % directions
    n = (len(caption),)

    def spoil(value: torch.Tensor, kinds: int) -> torch.Tensor:
        other = torch.randint(kinds, n, generator=generator)
        return torch.where(torch.rand(n, generator=generator) < wrong, other, value)

    colour = spoil(colour, colours)
    direction = spoil(direction, directions)
    return (colour * shapes + shape) * directions + direction


def _embed_padding_once(model: WanTransformer3DModel, padding: int) -> None:
    """Let the model take contexts without their zero padding: all padding embeds alike.

    It saves a sixth of a training step and changes no result.
    """
    embedder = model.condition_embedder.text_embedder
    whole = embedder.forward

    def forward(words: torch.Tensor) -> torch.Tensor:
        zero = whole(words.new_zeros(1, 1, words.shape[2])).expand(len(words), padding, -1)
        return torch.cat([whole(words), zero], 1)

    embedder.forward = forward


def train(
    folder: Path,
    context: torch.Tensor,
    steps: int,
    seed: int,
    threads: int,
    *,
    lr: float,
    wrong: float,
    result: str,
    start: str | None = None,
) -> None:
    """Train on ``latents.safetensors``; writes the averaged weights.

    Args:
        folder: work folder.
        context: embeddings of all 72 captions [72, 32, 4096].
        steps: optimiser steps.
        seed: of weights, noise and order.
        threads: CPU threads.
        lr: learning rate of the matrices.
        wrong: how often a caption's colour, and its direction, is replaced.
        result: name of the file to write.
        start: name of the file to start from; None for fresh weights.
    """
    torch.set_num_threads(threads)
    data = load_file(folder / "latents.safetensors")
    generator = torch.Generator().manual_seed(seed)
    model = new_wan(seed).train()
    if start is not None:
        model.load_state_dict(load_file(folder / start))
    words = int(context.abs().amax((0, 2)).nonzero().max()) + 1  # tokens that are not padding
    _embed_padding_once(model, context.shape[1] - words)
    context = context[:, :words]
    text = model.condition_embedder.text_embedder.linear_1
    embedding = [*text.parameters(), *model.patch_embedding.parameters()]
    optimiser = MuonAdam(model.parameters(), steps, lr=lr, adam_lr=2e-3, adam_only=embedding)
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
        captions = _wrong_captions(data["caption"][index], wrong, generator)
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
            save_file(averaged, folder / f"{result}.partial")
    save_file(averaged, folder / result)
