"""Start images: read, fitted to the video, encoded as the model takes them, and kept on the disk.

Sizes and order of operations are those of ComfyUI's WanImageToVideo and CLIPVisionEncode (without
cropping), so that a LoRA meets the same conditions in training as in use.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from ..conditioning import StartImage, needs_images
from ..control import Control
from ..errors import FlashGRPOError
from ..files import open_tensors, save_tensors, sha256_file
from .clip_vision import image_tokens, load_clip_vision
from .detect import WanSpec
from .text import encoder_sha256
from .vae import TEMPORAL, encode_pixels

#: Most pixels of a start image; far above any camera, far below what fills the memory.
MAX_PIXELS = 200_000_000
_KEPT = 8  # encoded images in memory, of a few MB each


def read_image(path: str | Path) -> np.ndarray:
    """Pixels of an image file, uint8 RGB `[H, W, 3]`, turned as its camera says.

    Raises:
        FlashGRPOError: it is missing, no image, or too large.
    """
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise FlashGRPOError(
                    f"start image {str(path)!r} has {picture.width}x{picture.height} pixels, the "
                    f"limit is {MAX_PIXELS:,}: make it smaller"
                )
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except FileNotFoundError:
        raise FlashGRPOError(f"start image {str(path)!r} does not exist: check the path") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise FlashGRPOError(
            f"start image {str(path)!r} cannot be read ({exc}): save it as PNG or JPEG"
        ) from None


def fit_image(image: np.ndarray, width: int, height: int) -> torch.Tensor:
    """An image cut about its centre to the video's shape and scaled to its size.

    Args:
        image: uint8 `[H, W, 3]`.
        width: of the video.
        height: of the video.

    Returns:
        fp32 `[3, height, width]` in 0..1.
    """
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255.0  # [3, H, W]
    old_height, old_width = image.shape[:2]
    wanted, given = width / height, old_width / old_height
    x = y = 0
    if given > wanted:
        x = round((old_width - old_width * (wanted / given)) / 2)
    elif given < wanted:
        y = round((old_height - old_height * (given / wanted)) / 2)
    cut = pixels[:, y : old_height - y, x : old_width - x]
    return torch.nn.functional.interpolate(cut[None], (height, width), mode="bilinear")[0]


@torch.no_grad()
def encode_channels(vae: Any, image: torch.Tensor, frames: int) -> torch.Tensor:
    """Mask and latents of a video whose first frame is the image and whose others are grey.

    Args:
        vae: from `load_vae`.
        image: `[3, H, W]` in 0..1.
        frames: frames of the video, 4n + 1.

    Returns:
        fp32 `[4 + C, T, h, w]` on the CPU: the mask is 1 at the first latent frame.
    """
    video = torch.full((1, 3, frames, *image.shape[1:]), 0.5)
    video[0, :, 0] = image
    latents = encode_pixels(vae, video * 2.0 - 1.0)[0].cpu()  # [C, T, h, w]
    mask = torch.zeros(TEMPORAL, *latents.shape[1:])
    mask[:, 0] = 1.0
    return torch.cat([mask, latents])


@torch.no_grad()
def encode_first(vae: Any, image: torch.Tensor) -> torch.Tensor:
    """Latents of an image alone, fp32 `[C, 1, h, w]` on the CPU."""
    return encode_pixels(vae, image[None, :, None] * 2.0 - 1.0)[0].cpu()


@dataclass(frozen=True)
class ImageEncoder:
    """What encodes start images.

    Attributes:
        spec: the model they are for.
        vae: from `load_vae`.
        vae_path: its file.
        clip_path: CLIP vision file; needed by models with an image embedder.
        size: `(width, height, frames)` of the videos.
        device: where the CLIP vision model runs.
    """

    spec: WanSpec
    vae: Any
    vae_path: str
    clip_path: str
    size: tuple[int, int, int]
    device: torch.device


def cached_start_images(
    paths: Sequence[str], encoder: ImageEncoder, cache_dir: str | Path, control: Control
) -> Callable[[str], StartImage]:
    """Encode start images unless they are on the disk already.

    Args:
        paths: image files.
        encoder: the networks and sizes.
        cache_dir: folder of the cache; it may be deleted at any time.
        control: progress and cancel; phase `encode`.

    Returns:
        Path -> its encoding, read from the disk when asked for.

    Raises:
        FlashGRPOError: an image cannot be read, or the CLIP vision file does not fit.
    """
    folder, spec = Path(cache_dir), encoder.spec
    hashes = folder / "encoders.json"
    dtype = str(next(encoder.vae.parameters()).dtype)
    common = [encoder_sha256(encoder.vae_path, hashes), dtype, *encoder.size, needs_images(spec)]
    if spec.image_dim is not None:
        common.append(encoder_sha256(encoder.clip_path, hashes))
    files = {}
    for path in dict.fromkeys(paths):
        if not Path(path).is_file():
            raise FlashGRPOError(f"start image {path!r} does not exist: check the path")
        key = json.dumps(["start image", sha256_file(Path(path)), *common])
        files[path] = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"
    missing = {path: file for path, file in files.items() if not file.is_file()}
    if missing:
        _encode(missing, encoder, control)

    @lru_cache(maxsize=_KEPT)
    def look_up(path: str) -> StartImage:
        stored = open_tensors(files[path])
        found = {key: stored.get(key) for key in stored.keys()}
        return StartImage(found.get("channels"), found.get("tokens"), found.get("first"))

    return look_up


def _encode(missing: dict[str, Path], encoder: ImageEncoder, control: Control) -> None:
    """Encode images into their files, the CLIP vision model first and then gone."""
    width, height, frames = encoder.size
    control.phase("encode", len(missing) * (1 + (encoder.spec.image_dim is not None)))
    tokens: dict[str, torch.Tensor] = {}
    if encoder.spec.image_dim is not None:
        network = load_clip_vision(encoder.clip_path, encoder.device, encoder.spec.image_dim)
        try:
            control.bring(network)
            for path in missing:
                control.check()
                tokens[path] = image_tokens(network, read_image(path))
                control.tick()
        finally:
            del network
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    control.bring(encoder.vae)
    for path, file in missing.items():
        control.check()
        image = fit_image(read_image(path), width, height)
        if needs_images(encoder.spec):
            found = {"channels": encode_channels(encoder.vae, image, frames)}
        else:
            found = {"first": encode_first(encoder.vae, image)}
        if path in tokens:
            found["tokens"] = tokens[path]
        save_tensors(file, found)
        control.tick()
