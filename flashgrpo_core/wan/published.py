"""Sizes of the published Wan models, for planning without their files."""

from __future__ import annotations

from typing import Any

from .detect import HEAD_DIM, WanSpec
from .vae import VaeSpec

_COMMON: dict[str, Any] = {
    "layout": "original",
    "prefix": "",
    "text_dim": 4096,
    "freq_dim": 256,
    "patch_size": (1, 2, 2),
    "pos_embed_seq_len": None,
    "cross_attn_norm": True,
    "weight_dtype": "bf16",
    "quantisation": "none",
    "parameters": 0,
}


def _spec(
    family: str,
    size: str,
    dim: int,
    ffn_dim: int,
    layers: int,
    channels: tuple[int, int] = (16, 16),
    image: int | None = None,
) -> WanSpec:
    return WanSpec(
        family=family,
        size=size,
        dim=dim,
        ffn_dim=ffn_dim,
        num_layers=layers,
        num_heads=dim // HEAD_DIM,
        in_channels=channels[0],
        out_channels=channels[1],
        image_dim=image,
        added_kv_proj_dim=None if image is None else dim,
        **_COMMON,
    )


_14B = ("14B", 5120, 13824, 40)

#: Model as the presets name it -> its transformer; the two experts of A14B have equal shapes.
TRANSFORMERS: dict[str, WanSpec] = {
    "Wan 2.1 1.3B": _spec("wan2.1-t2v", "1.3B", 1536, 8960, 30),
    "Wan 2.1 14B T2V": _spec("wan2.1-t2v", *_14B),
    "Wan 2.1 14B I2V": _spec("wan2.1-i2v", *_14B, (36, 16), 1280),
    "Wan 2.2 A14B T2V": _spec("wan2.2-t2v-a14b", *_14B),
    "Wan 2.2 A14B I2V": _spec("wan2.2-i2v-a14b", *_14B, (36, 16)),
    "Wan 2.2 5B": _spec("wan2.2-ti2v-5b", "5B", 3072, 14336, 30, (48, 48)),
}

_VAE: dict[str, Any] = {
    "layout": "original", "weight_dtype": "fp32", "quantisation": "none", "parameters": 0,
}  # fmt: skip
VAE_21 = VaeSpec("2.1", base_dim=96, decoder_base_dim=96, z_dim=16, in_channels=3, out_channels=3, **_VAE)  # fmt: skip
VAE_22 = VaeSpec("2.2", base_dim=160, decoder_base_dim=256, z_dim=48, in_channels=12, out_channels=12, **_VAE)  # fmt: skip

#: UMT5-XXL: parameters, feed-forward width, heads, embeddings and a layer. CLIP ViT-H: parameters of its vision model.
UMT5_XXL = (5_680_910_336, 10240, 64, (256_384 + 10_240) * 4096)
CLIP_VIT_H = 632_076_800
