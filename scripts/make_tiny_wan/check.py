"""Check the finished files: reconstruction, latent statistics, base reward, contact sheet."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import text
import torch
import vae as vae_stage
import wan as wan_stage
from codec import render_clips, to_pixels
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from flashgrpo_core import tiny_world
from flashgrpo_core.rewards.batch import VideoBatch
from flashgrpo_core.rewards.tiny_world import TinyWorldReward

log = logging.getLogger("make_tiny_wan")

FILES = ("tiny_wan_t2v.safetensors", "tiny_wan_vae.safetensors", "tiny_wan_umt5.safetensors")


def load_wan(path: Path) -> WanTransformer3DModel:
    """Load an original-layout file strictly; computes in fp32."""
    model = wan_stage.new_wan(0)
    state = {k: v.float() for k, v in load_file(path).items()}
    model.load_state_dict(convert_wan_transformer_to_diffusers(state), strict=True)
    return model.eval().requires_grad_(False)


def load_vae(path: Path) -> AutoencoderKLWan:
    """Load an original-layout file strictly; computes in fp32."""
    model = vae_stage.new_vae(0)
    state = {k: v.float() for k, v in load_file(path).items()}
    model.load_state_dict(convert_wan_vae_to_diffusers(state), strict=True)
    return model.eval().requires_grad_(False)


def _statistics(vae: AutoencoderKLWan) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, 16, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape)
    return mean, torch.tensor(vae.config.latents_std).view(shape)


def encode(vae: AutoencoderKLWan, clips: torch.Tensor) -> torch.Tensor:
    """uint8 clips [B, T, H, W, 3] to normalised latents [B, 16, t, h, w]."""
    mean, std = _statistics(vae)
    parts = [vae.encode(to_pixels(c)).latent_dist.mode() for c in clips.split(8)]
    return (torch.cat(parts) - mean) / std


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> np.ndarray:
    """Normalised latents [B, 16, t, h, w] to uint8 videos [B, T, H, W, 3]."""
    mean, std = _statistics(vae)
    parts = [vae.decode(z * std + mean).sample for z in latents.split(8)]
    pixels = ((torch.cat(parts) + 1.0) * 127.5).round().clamp(0, 255).byte()
    return pixels.permute(0, 2, 3, 4, 1).contiguous().numpy()


def base_samples(
    folder: Path, prompts: list[str], seeds: list[int]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Sample one video per (prompt, seed) pair with the files in ``folder`` and score them."""
    context = text.embed(folder / FILES[2], prompts)
    latents = wan_stage.sample(load_wan(folder / FILES[0]), context, seeds)
    videos = decode(load_vae(folder / FILES[1]), latents)
    batch = VideoBatch(videos, prompts, float(tiny_world.FPS), [str(s) for s in seeds])
    return videos, TinyWorldReward().score(batch)


@torch.no_grad()
def report(folder: Path, picture: Path | None = None, per_prompt: int = 4) -> dict[str, float]:
    """Measure the files, log the figures and draw the contact sheet."""
    figures: dict[str, float] = {}
    sizes = {name: (folder / name).stat().st_size for name in FILES}
    figures["bytes"] = sum(sizes.values())
    vae = load_vae(folder / FILES[1])
    clips, _ = render_clips(72, 99)
    latents = encode(vae, clips)
    back = torch.from_numpy(decode(vae, latents))
    # Squared error of pixels in -1..1, the VAE's own range.
    figures["reconstruction_mse"] = (to_pixels(back) - to_pixels(clips)).square().mean().item()
    figures["latent_mean_max"] = latents.mean((0, 2, 3, 4)).abs().max().item()
    figures["latent_std_min"] = latents.std((0, 2, 3, 4)).min().item()
    figures["latent_std_max"] = latents.std((0, 2, 3, 4)).max().item()
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        started = time.perf_counter()
        decode(vae, latents[:16])
        figures[f"decode_seconds_per_clip_{count}_threads"] = (time.perf_counter() - started) / 16
    torch.set_num_threads(threads)

    prompts = tiny_world.all_prompts() * per_prompt
    videos, scores = base_samples(folder, prompts, list(range(len(prompts))))
    for name, values in scores.items():
        figures[f"base {name}"] = float(values.mean())
    figures["base spread"] = float(scores["tiny_world"].std())
    fields = [tiny_world.parse_prompt(p) for p in prompts]
    for kind, part in (("colour", 0), ("shape", 1), ("direction", 2)):
        for word in dict.fromkeys(f[part] for f in fields):
            chosen = [i for i, f in enumerate(fields) if f[part] == word]
            figures[f"base {kind} {word}"] = float(scores["tiny_world"][chosen].mean())
    for name, value in {**sizes, **figures}.items():
        log.info("%-40s %.5g", name, value)
    if picture is not None:
        _contact_sheet(videos, prompts, scores, picture)
    return figures


def _contact_sheet(
    videos: np.ndarray, prompts: list[str], scores: dict[str, np.ndarray], path: Path
) -> None:
    """Fourteen base samples, frames 0, 2, 4, 6, 8 side by side, with caption and reward."""
    frame, columns, shown = 80, 2, 14
    chosen = [(i * 19) % len(prompts) for i in range(shown)]  # 19: all words take turns
    width, height = 5 * frame + 12, frame + 22
    sheet = Image.new("RGB", (columns * width, shown // columns * height), (250, 250, 250))
    draw = ImageDraw.Draw(sheet)
    for place, i in enumerate(chosen):
        left, top = place % columns * width + 6, place // columns * height
        label = (
            f"{prompts[i]}: {scores['tiny_world'][i]:.2f} "
            f"(colour {scores['tiny_world.colour'][i]:.2f}, "
            f"direction {scores['tiny_world.direction'][i]:.2f})"
        )
        draw.text((left, top + 4), label, fill=(20, 20, 20))
        for column, t in enumerate(range(0, tiny_world.FRAMES, 2)):
            image = Image.fromarray(videos[i, t]).resize((frame - 2, frame - 2), Image.BICUBIC)
            sheet.paste(image, (left + column * frame, top + 18))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)
