"""What a start image adds to every forward of a Wan model.

The three image-to-video families take it differently, and a model uses only its own part:

- 2.1 and 2.2-A14B image-to-video: mask and encoded start video as channels beside the latents;
- 2.1 image-to-video also: the image's CLIP vision tokens, before the text in cross-attention;
- 2.2 TI2V-5B: the clean first latent frame in place of the noisy one, whose tokens are told
  timestep 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import FlashGRPOError
from .schedule import TRAIN_STEPS

if TYPE_CHECKING:
    from .wan.detect import WanSpec


@dataclass(frozen=True, eq=False)
class StartImage:
    """An encoded start image; fp32 on the CPU. `None` is what the model does not use.

    Attributes:
        channels: mask (4 channels, 1 where the frame is given) and normalised latents of the start
            image followed by grey frames, `[4 + C, T, H, W]`.
        tokens: CLIP vision tokens, second-to-last layer, `[n, width]`.
        first: normalised latents of the image alone, `[C, 1, H, W]`.
    """

    channels: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    first: torch.Tensor | None = None


def find_image(images: Callable[[str], StartImage] | None, path: str | None) -> StartImage | None:
    """The encoding of a prompt's start image, None for a prompt without one."""
    return None if images is None or path is None else images(path)


def model_inputs(
    latents: torch.Tensor, timestep: float, image: StartImage, patch: tuple[int, int, int]
) -> dict[str, torch.Tensor]:
    """Arguments of the transformer for latents with a start image.

    Args:
        latents: `[B, C, T, H, W]` on the device, in the compute type.
        timestep: 1000 * sigma.
        image: the start image.
        patch: the transformer's patch size `(t, h, w)`.

    Returns:
        `hidden_states`, `timestep` (per token `[B, tokens]` when the first frame is given, else
        `[B]`) and perhaps `encoder_hidden_states_image` `[1, n, width]`.
    """
    device, dtype = latents.device, latents.dtype
    batch, _, frames, height, width = latents.shape
    inputs: dict[str, torch.Tensor] = {}
    times = torch.full((batch,), timestep, device=device, dtype=torch.float32)
    if image.first is not None:
        first = image.first.to(device, dtype).expand(batch, -1, -1, -1, -1)
        latents = torch.cat([first, latents[:, :, 1:]], 2)
        per_frame = (height // patch[1]) * (width // patch[2])
        times = times[:, None].repeat(1, frames // patch[0] * per_frame)  # [B, tokens]
        times[:, :per_frame] = 0.0
    if image.channels is not None:
        beside = image.channels.to(device, dtype).expand(batch, -1, -1, -1, -1)
        latents = torch.cat([latents, beside], 1)  # [B, C + 4 + C, T, H, W]
    if image.tokens is not None:
        tokens = image.tokens.to(device, dtype)[None]  # one row, see wan/context.py
        inputs["encoder_hidden_states_image"] = tokens
    return {"hidden_states": latents, "timestep": times, **inputs}


def known_velocity(
    velocity: torch.Tensor, latents: torch.Tensor, first: torch.Tensor, timestep: float
) -> torch.Tensor:
    """Velocity with that of the given first frame, v = (x - x0) / sigma, which is known exactly.

    It leads the noisy frame to the given one by itself, so samplers need no mask, and it does not
    depend on the policy, so it adds nothing to a probability ratio.
    """
    known = (latents[:, :, :1].to(velocity) - first.to(velocity)) * (TRAIN_STEPS / timestep)
    return torch.cat([known, velocity[:, :, 1:]], 2)


def takes_images(spec: WanSpec) -> bool:
    """Whether a model can start from an image."""
    return spec.in_channels != spec.out_channels or spec.family == "wan2.2-ti2v-5b"


def needs_images(spec: WanSpec) -> bool:
    """Whether a model cannot do without a start image."""
    return spec.in_channels != spec.out_channels


def blank_image(spec: WanSpec, shape: tuple[int, ...]) -> StartImage | None:
    """A start image of zeros for latents of `shape` `(C, T, H, W)`; None for text-to-video."""
    if not needs_images(spec):
        return None
    tokens = None if spec.image_dim is None else torch.zeros(257, spec.image_dim)
    return StartImage(torch.zeros(spec.in_channels - spec.out_channels, *shape[1:]), tokens)


def check_images(spec: WanSpec, images: list[str | None]) -> None:
    """Check that prompts and model agree about start images.

    Args:
        spec: the model.
        images: start image of each prompt of the run.

    Raises:
        FlashGRPOError: an image-to-video model without images, or images for a text model.
    """
    missing = sum(image is None for image in images)
    if needs_images(spec) and missing:
        raise FlashGRPOError(
            f"{missing} of {len(images)} prompts have no start image, which {spec.family} needs: "
            'give each line of the .jsonl prompts file an "image", or connect start_image'
        )
    if missing < len(images) and not takes_images(spec):
        raise FlashGRPOError(
            f"{len(images) - missing} prompts have a start image, but {spec.family} makes videos "
            "from text only: leave the images out, or use an image-to-video model"
        )
