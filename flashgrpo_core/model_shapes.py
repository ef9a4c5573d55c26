"""The sizes of a run's networks without their weights: from headers of files, or as published."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import Config
from .errors import FlashGRPOError
from .files import TensorFile, open_tensors
from .memory_trace import on_demand
from .networks import model_spec
from .policy import WanPolicy
from .wan.clip_vision import clip_vision_config
from .wan.detect import WanSpec
from .wan.published import CLIP_VIT_H, TRANSFORMERS, UMT5_XXL, VAE_21, VAE_22
from .wan.storage import StoredLinear, stored_keys
from .wan.text import encoder_config
from .wan.transformer import empty_transformer, fp32_islands
from .wan.vae import VaeSpec, detect_vae
from .wan.weights import component_folder


@dataclass(frozen=True)
class ModelShapes:
    """The networks of a run.

    Attributes:
        spec: the transformer.
        vae: the VAE.
        encoder_parameters: of the text encoder; 0 when a host encodes.
        encoder_width: its feed-forward width.
        encoder_heads: its attention heads.
        encoder_streamed: parameters that stay on the device when its layers are streamed: the
            words' embeddings, and one layer's weight.
        clip_parameters: of the CLIP vision model, 0 without one.
        largest_tensor: bytes that reading the largest tensor takes besides the network.
        reward_bytes: files of models that reward terms name.
    """

    spec: WanSpec
    vae: VaeSpec
    encoder_parameters: int = 0
    encoder_width: int = 0
    encoder_heads: int = 0
    encoder_streamed: int = 0
    clip_parameters: int = 0
    largest_tensor: int = 0
    reward_bytes: int = 0

    @property
    def spatial(self) -> int:
        """Pixels per latent."""
        return 16 if self.vae.version == "2.2" else 8

    def encoder_work(self, tokens: int, itemsize: int) -> int:
        """Activations of the text encoder for one prompt: scores in fp32, and the feed-forward."""
        scores = 3 * self.encoder_heads * tokens**2 * 4
        return scores + 4 * tokens * self.encoder_width * itemsize


def model_shapes(config: Config) -> ModelShapes:
    """Shapes of the configured files, from their headers.

    Args:
        config: with embedded files filled in.

    Raises:
        FlashGRPOError: a file is missing, or not what it should be.
    """
    model = config.model
    if not model.vae:
        raise FlashGRPOError(
            "model.vae is empty: name the Wan VAE .safetensors file, e.g. wan_2.1_vae.safetensors"
        )
    spec = model_spec(config)
    shapes = ModelShapes(spec, detect_vae(open_tensors(component_folder(model.vae, "vae"))))
    if model.text_encoder:
        file = open_tensors(component_folder(model.text_encoder, "text_encoder"))
        text = encoder_config(file)
        shapes = replace(
            shapes,
            encoder_parameters=_parameters(file),
            encoder_width=text.d_ff,
            encoder_heads=text.num_heads,
            encoder_streamed=text.vocab_size * text.d_model + text.d_ff * text.d_model,
        )
    if spec.image_dim is not None and model.clip_vision:
        file = open_tensors(model.clip_vision)
        clip_vision_config(file)
        shapes = replace(shapes, clip_parameters=_parameters(file))
    terms = [*config.reward.terms, *config.eval.terms]
    paths = {str(term["model"]) for term in terms if term.get("model")}
    return replace(
        shapes,
        largest_tensor=_largest(open_tensors(component_folder(model.transformer, "transformer"))),
        reward_bytes=sum(_weights_on_disk(Path(path)) for path in paths),
    )


def published_shapes(model: str) -> ModelShapes:
    """Shapes of a published model, named as the presets name it."""
    spec = TRANSFORMERS[model]
    return ModelShapes(
        spec,
        VAE_22 if spec.out_channels == 48 else VAE_21,
        *UMT5_XXL,
        clip_parameters=0 if spec.image_dim is None else CLIP_VIT_H,
        largest_tensor=6 * spec.dim * spec.ffn_dim,
    )


def _parameters(file: TensorFile) -> int:
    return sum(
        torch.Size(file.shape(key)).numel() for key in file.keys() if len(file.shape(key)) > 0
    )


def _largest(file: TensorFile) -> int:
    """Bytes of the largest tensor as it is read, and again in fp32."""
    return max(
        torch.Size(file.shape(k)).numel() * (file.dtype(k).itemsize + 4) for k in file.keys()
    )


def _weights_on_disk(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def empty_policy(
    config: Config, spec: WanSpec, dtype: torch.dtype, blocks: int, keep: int
) -> WanPolicy:
    """The policy of a configuration on the meta device, with another number of blocks.

    When some of the model's blocks are swapped and others not, the last of these is swapped.

    Args:
        config: the configuration; its `model.storage` is not `auto`.
        spec: the whole model.
        dtype: compute type.
        blocks: number of blocks.
        keep: how many of them keep their activations.
    """
    model = config.model
    transformer = empty_transformer(replace(spec, num_layers=blocks))
    islands = fp32_islands(transformer, dtype)
    for name, parameter in transformer.named_parameters():
        keep = any(part in islands for part in name.split("."))
        parameter.data = parameter.data.to(torch.float32 if keep else dtype)
    swap = model.blocks_to_swap
    if blocks != spec.num_layers:
        swap = blocks if swap >= spec.num_layers else min(swap, 1)
    _store(transformer, dtype, model.storage, swap)
    on_demand(transformer)
    return WanPolicy(
        transformer,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        targets=model.lora_targets,
        gradient_checkpointing=model.gradient_checkpointing,
        blocks_to_keep=keep,
    )


def _store(transformer: nn.Module, dtype: torch.dtype, storage: str, swap: int) -> None:
    """Replace linear layers as `wan.storage.store_blocks` does, without a file."""
    network: Any = transformer
    stored = stored_keys(dict(network.named_parameters()), len(network.blocks), storage, swap)
    for key, store in stored.items():
        owner, _, leaf = key.removesuffix(".weight").rpartition(".")
        parent = network.get_submodule(owner)
        old = getattr(parent, leaf)
        weight, scale = old.weight.data, None
        if store.eight_bit:
            weight = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device="meta")
            scale = torch.empty(weight.shape[0], device="meta")
        setattr(parent, leaf, StoredLinear(weight, old.bias, dtype, scale, store.swapped).eval())
