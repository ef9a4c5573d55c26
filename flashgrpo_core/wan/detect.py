"""Recognise a Wan diffusion model, and name what a file is when it is something else.

The architecture is read from tensor shapes, so that a file alone is enough: no configuration file
and no hub. High- and low-noise experts of Wan 2.2 have identical shapes and cannot be told apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import FlashGRPOError
from ..files import TensorFile
from . import names
from .weights import Weights

HEAD_DIM = 128  # of every published Wan; not readable from the weights

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")

_SIZES = {(1536, 8960, 30): "1.3B", (5120, 13824, 40): "14B", (3072, 14336, 30): "5B"}
_BLOCK_INDEX = re.compile(r"^blocks\.(\d+)\.")

#: Key fragments of Wan variants that are another architecture.
_VARIANTS: tuple[tuple[str, str], ...] = (
    ("vace_", "a Wan VACE model"),
    ("control_adapter.", "a Wan camera-control model"),
    ("casual_audio_encoder.", "a Wan sound-to-video model"),
    ("audio_proj.", "a HuMo (Wan with audio) model"),
    ("face_adapter.", "a Wan Animate model"),
    ("motion_encoder.", "a Wan Animate model"),
    ("ref_conv.", "a Wan Fun reference model"),
)

_LORA = re.compile(
    r"(lora_[AB]\b|lora_(down|up)\b|^lora_unet_|^lycoris_|\.lora\.(up|down)\.|\.hada_|\.lokr_)"
)

#: Keys (or starts of keys, with a trailing dot) that identify a file of another kind.
_OTHERS: tuple[tuple[str, str], ...] = (
    ("decoder.middle.0.residual.0.gamma", "a Wan VAE"),
    ("decoder.mid_block.resnets.0.norm1.gamma", "a Wan VAE"),
    ("encoder.block.0.layer.0.SelfAttention.q.weight", "a T5/UMT5 text encoder"),
    ("token_embedding.weight", "a UMT5 text encoder in the original Wan layout"),
    ("text_model.encoder.layers.", "a CLIP text encoder"),
    ("vision_model.", "a CLIP vision model"),
    ("visual.transformer.", "a CLIP vision model"),
    ("double_blocks.0.img_attn.", "a Flux or HunyuanVideo diffusion model"),
    ("input_blocks.0.", "a Stable Diffusion model"),
    ("down_blocks.0.", "a Stable Diffusion model"),
    ("joint_blocks.0.", "a Stable Diffusion 3 model"),
    ("transformer_blocks.0.img_mod.", "a Qwen-Image model"),
    ("transformer_blocks.0.", "another diffusion transformer (LTX, Flux, CogVideoX, ...)"),
    ("first_stage_model.", "a full Stable Diffusion checkpoint"),
    ("model.layers.0.", "a language model"),
    ("decoder.conv_in.weight", "an image VAE"),
)


@dataclass(frozen=True)
class WanSpec:
    """What a Wan diffusion model file holds. Sizes are channel counts.

    Attributes:
        family: `wan2.1-t2v` (also both Wan 2.2 T2V-A14B experts, whose shapes are the same),
            `wan2.1-i2v`, `wan2.2-i2v-a14b` or `wan2.2-ti2v-5b`.
        size: `1.3B`, `14B`, `5B` or `custom`.
        layout: `original` (ComfyUI) or `diffusers` key names.
        prefix: what stands before every key.
        weight_dtype: stored dtype of most weights, such as `bf16`.
        quantisation: `none`, `fp8`, `fp8_scaled` or `int8_scaled`.
        pos_embed_seq_len: image tokens of a first-last-frame model, else None.
    """

    family: str
    size: str
    layout: str
    prefix: str
    dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    patch_size: tuple[int, int, int]
    image_dim: int | None
    added_kv_proj_dim: int | None
    pos_embed_seq_len: int | None
    cross_attn_norm: bool
    weight_dtype: str
    quantisation: str
    parameters: int


def find_prefix(file: TensorFile) -> tuple[str, str] | None:
    """`(prefix, layout)` when the file holds a Wan-like diffusion model, else None."""
    for prefix in PREFIXES:
        if f"{prefix}head.modulation" in file:
            return prefix, "original"
        if f"{prefix}condition_embedder.time_proj.weight" in file:
            return prefix, "diffusers"
    return None


def detect_transformer(file: TensorFile, head_dim: int = HEAD_DIM) -> WanSpec:
    """Read the architecture of a Wan diffusion model from its tensor shapes.

    Args:
        file: the opened checkpoint.
        head_dim: channels of an attention head; only a Diffusers configuration can say another.

    Raises:
        FlashGRPOError: the file is something else (named), a Wan variant that is not supported,
            or its shapes fit no Wan.
    """
    found = find_prefix(file)
    if found is None:
        raise FlashGRPOError(
            f"{file.path}: this is {kind_of(file)}, not a Wan diffusion model; choose a file from "
            "ComfyUI's diffusion_models folder such as wan2.1_t2v_1.3B_bf16.safetensors"
        )
    prefix, layout = found
    for key in file.keys():
        for mark, variant in _VARIANTS:
            if key.startswith(prefix + mark):
                raise FlashGRPOError(
                    f"{file.path}: this is {variant}, which is not supported; use a Wan 2.1 or "
                    "2.2 text-to-video or image-to-video model"
                )
    weights = Weights(file, prefix)

    def key_of(original: str) -> str:
        return (names.to_diffusers(original) or original) if layout == "diffusers" else original

    def shape(original: str, rank: int) -> tuple[int, ...]:
        key = key_of(original)
        if key not in weights.names or len(weights.shape(key)) != rank:
            raise FlashGRPOError(
                f"{file.path}: tensor `{key}` is missing or has no {rank} dimensions; "
                "the Wan checkpoint is incomplete, download it again"
            )
        return weights.shape(key)

    def has(original: str) -> bool:
        return key_of(original) in weights.names

    patch = shape("patch_embedding.weight", 5)
    dim, in_channels = patch[0], patch[1]
    patch_size = (patch[2], patch[3], patch[4])
    cells = patch_size[0] * patch_size[1] * patch_size[2]
    out_rows = shape("head.head.weight", 2)[0]
    if dim % head_dim or dim == 0:
        raise FlashGRPOError(
            f"{file.path}: width {dim} is not a multiple of the head size {head_dim}; "
            "use an unmodified Wan model"
        )
    if out_rows % cells:
        raise FlashGRPOError(
            f"{file.path}: {out_rows} output rows do not fill patches of {cells} cells; "
            "use an unmodified Wan model"
        )
    layers = {int(m[1]) for name in weights.names if (m := _BLOCK_INDEX.match(name))}
    if layers != set(range(len(layers))) or not layers:
        raise FlashGRPOError(
            f"{file.path}: blocks {sorted(layers)[:8]}... are not numbered without gaps; "
            "the Wan checkpoint is incomplete, download it again"
        )
    ffn_dim = shape("blocks.0.ffn.0.weight", 2)[0]
    out_channels = out_rows // cells
    image = has("img_emb.proj.1.weight")
    added = has("blocks.0.cross_attn.k_img.weight")
    return WanSpec(
        family=_family(file, in_channels, out_channels, image),
        size=_SIZES.get((dim, ffn_dim, len(layers)), "custom"),
        layout=layout,
        prefix=prefix,
        dim=dim,
        ffn_dim=ffn_dim,
        num_layers=len(layers),
        num_heads=dim // head_dim,
        in_channels=in_channels,
        out_channels=out_channels,
        text_dim=shape("text_embedding.0.weight", 2)[1],
        freq_dim=shape("time_embedding.0.weight", 2)[1],
        patch_size=patch_size,
        image_dim=shape("img_emb.proj.1.weight", 2)[1] if image else None,
        added_kv_proj_dim=shape("blocks.0.cross_attn.k_img.weight", 2)[1] if added else None,
        pos_embed_seq_len=shape("img_emb.emb_pos", 3)[1] if has("img_emb.emb_pos") else None,
        cross_attn_norm=has("blocks.0.norm3.weight"),
        weight_dtype=weights.dtype,
        quantisation=weights.quantisation,
        parameters=weights.parameters,
    )


def _family(file: TensorFile, in_channels: int, out_channels: int, image: bool) -> str:
    """Family by channels: image-to-video adds a mask (4) and a condition (16) to the latents."""
    if in_channels == out_channels and not image:
        return "wan2.2-ti2v-5b" if in_channels == 48 else "wan2.1-t2v"
    if in_channels == out_channels * 2 + 4:
        return "wan2.1-i2v" if image else "wan2.2-i2v-a14b"
    raise FlashGRPOError(
        f"{file.path}: a Wan variant with {in_channels} input and {out_channels} output channels "
        "(control or inpaint model?), which is not supported; use a text-to-video or "
        "image-to-video model"
    )


def is_lora(file: TensorFile) -> bool:
    """Whether a file holds LoRA or other adapter weights."""
    keys = file.keys()
    return any(_LORA.search(key) for key in keys) or (
        bool(keys) and all(key.endswith((".diff", ".diff_b", ".alpha")) for key in keys)
    )


def kind_of(file: TensorFile) -> str:
    """In words, what kind of model a file holds."""
    if is_lora(file):
        return "a LoRA"
    if find_prefix(file):
        return "a Wan diffusion model"
    keys = file.keys()
    plain = [key.removeprefix(PREFIXES[0]) for key in keys]
    for mark, kind in _OTHERS:
        if any(key == mark or (mark.endswith(".") and key.startswith(mark)) for key in plain):
            return kind
    return f"an unknown model ({len(keys)} tensors, first `{keys[0]}`)" if keys else "an empty file"
