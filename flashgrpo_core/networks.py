"""From a configuration to loaded networks: the policy, one transformer or two, and the VAE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import Config, ModelConfig
from .devices import pick_device
from .embedded import with_embedded_files
from .errors import FlashGRPOError
from .experts import HIGH, LOW, Policy, TwoExperts
from .files import open_tensors
from .policy import WanPolicy, policy_weights
from .seeds import derive_seed
from .wan.decode import use_tiles
from .wan.detect import WanSpec, detect_transformer
from .wan.lora import merge_lora, read_lora
from .wan.lora_origin import check_origin, expert_hint, expert_of
from .wan.transformer import load_transformer
from .wan.vae import load_vae
from .windows import expert_boundary, trained_experts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Networks:
    """The loaded networks of a run.

    Attributes:
        policy: transformer with LoRA, or two experts.
        vae: the VAE.
        spec: architecture of the transformer, from its tensor shapes.
        device: compute device.
    """

    policy: Policy
    vae: Any
    spec: WanSpec
    device: torch.device

    @property
    def transformers(self) -> list[nn.Module]:
        """The transformers, in the order in which they sample."""
        return [expert.transformer for expert in self.policy.experts.values()]


def pick_dtype(name: str, weight_dtype: str, device: torch.device) -> torch.dtype:
    """Compute type of the frozen weights: `auto` keeps 16-bit files 16-bit except on the CPU."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu" or weight_dtype in ("F32", "float32", "fp32"):
        return torch.float32
    return torch.float16 if weight_dtype in ("F16", "float16", "fp16") else torch.bfloat16


def load_networks(
    config: Config, device: torch.device | None = None, place: torch.device | None = None
) -> Networks:
    """Load transformer or experts (frozen LoRAs merged, the policy's LoRA attached) and VAE.

    Args:
        config: the configuration.
        device: where the networks will run; None picks `model.device`.
        place: where the weights are put for now, by hosts that move them; None is `device`.

    Raises:
        FlashGRPOError: a file is missing, broken or of another model family.
    """
    config = with_embedded_files(config)
    model = config.model
    if not model.vae:
        raise FlashGRPOError(
            "model.vae is empty: name the Wan VAE .safetensors file, e.g. wan_2.1_vae.safetensors"
        )
    spec = model_spec(config)
    device = device or pick_device(model.device)
    place = place or device
    home: torch.device | None = None
    if model.offload and place.type != "cpu":
        # Each comes to the device when it is needed, so that two large ones never meet there, not
        # even while they are loaded.
        home, place = place, torch.device("cpu")
    dtype = pick_dtype(model.dtype, spec.weight_dtype, device)
    check_loras(config, spec)
    storage = resting_storage(model.storage, spec, device)
    policy: Policy
    if not model.transformer_low:
        policy = _load_expert(config, model.transformer, "", dtype, place, storage)
    else:
        high = _load_expert(config, model.transformer, HIGH, dtype, place, storage)
        low = _load_expert(config, model.transformer_low, LOW, dtype, place, storage)
        policy = TwoExperts(high, low, expert_boundary(config))
    vae_dtype = torch.float32 if device.type == "cpu" else dtype
    vae = load_vae(model.vae, vae_dtype, place)
    use_tiles(vae, model.vae_tile)
    if home is not None:
        for network in (*(e.transformer for e in policy.experts.values()), vae):
            vars(network)["home"] = home  # where the host brings it
    if vae.config.z_dim != spec.out_channels:
        raise FlashGRPOError(
            f"model.vae has {vae.config.z_dim} latent channels, the {spec.family} model "
            f"{spec.out_channels}: use wan2.2_vae.safetensors with the 5B model and "
            "wan_2.1_vae.safetensors with every other"
        )
    return Networks(policy, vae, spec, device)


def _load_expert(
    config: Config, path: str, name: str, dtype: torch.dtype, place: torch.device, storage: str
) -> WanPolicy:
    """One transformer as a policy; `name` is that of the expert."""
    model = config.model
    transformer, _ = load_transformer(
        path,
        dtype,
        place,
        storage=storage,
        blocks_to_swap=model.blocks_to_swap,
    )
    for entry in model.frozen_loras:
        if entry.get("expert", "") in ("", name):
            merge_lora(transformer, read_lora(entry["file"]), float(entry.get("strength", 1.0)))
    seed = config.run.seed
    policy = WanPolicy(
        transformer,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        targets=model.lora_targets,
        seed=derive_seed(seed, LOW) if name == LOW else seed,
        gradient_checkpointing=model.gradient_checkpointing,
        blocks_to_keep=model.blocks_to_keep,
        name=name,
        trained=name in trained_experts(config),
    )
    start = model.continue_from_low if name == LOW else model.continue_from
    if start and policy.trained:
        _continue(policy, start)
    return policy


def resting_storage(wanted: str, spec: WanSpec, device: torch.device) -> str:
    """`auto` keeps the weights of fp8 files in 8 bits on a GPU."""
    if wanted != "auto":
        return wanted
    return "fp8" if spec.quantisation != "none" and device.type == "cuda" else "full"


def model_spec(config: Config) -> WanSpec:
    """Architecture of the configured transformer, from its header alone.

    Raises:
        FlashGRPOError: it is no supported Wan, or the two experts do not belong together.
    """
    model = with_embedded_files(config).model
    spec = detect_transformer(open_tensors(model.transformer))
    if spec.pos_embed_seq_len is not None:
        raise FlashGRPOError(
            f"{model.transformer}: a first-last-frame model, which cannot be trained here: use an "
            "image-to-video model"
        )
    if spec.image_dim is not None and not model.clip_vision:
        raise FlashGRPOError(
            "model.clip_vision is empty, which Wan 2.1 image-to-video needs: name "
            "clip_vision_h.safetensors from ComfyUI's clip_vision folder"
        )
    if spec.image_dim is not None and model.text_tokens not in (0, 512):
        raise FlashGRPOError(
            f"model.text_tokens = {model.text_tokens} does not go with an image embedder, whose "
            "attention counts on 512: set it to 0"
        )
    if not model.transformer_low:
        return spec
    low = detect_transformer(open_tensors(model.transformer_low))
    if _shapes(low) != _shapes(spec):
        raise FlashGRPOError(
            f"model.transformer_low is {low.family} ({low.size}), model.transformer {spec.family} "
            f"({spec.size}): use the high- and low-noise files of one model"
        )
    if spec.image_dim is not None or spec.family == "wan2.2-ti2v-5b":
        raise FlashGRPOError(
            f"{spec.family} has no low-noise expert: leave model.transformer_low empty"
        )
    _check_order(model)
    return replace(spec, family="wan2.2-" + spec.family.split("-")[1] + "-a14b")


def _shapes(spec: WanSpec) -> tuple[Any, ...]:
    return spec.family, spec.dim, spec.ffn_dim, spec.num_layers, spec.in_channels, spec.text_dim


def _check_order(model: ModelConfig) -> None:
    first, second = expert_hint(model.transformer), expert_hint(model.transformer_low)
    if first == LOW or second == HIGH:
        raise FlashGRPOError(
            f"model.transformer is {model.transformer!r} and model.transformer_low "
            f"{model.transformer_low!r}: by their names the experts are swapped, exchange them"
        )


def check_loras(config: Config, spec: WanSpec) -> None:
    """Refuse LoRAs that were made for another family or expert than they are put on.

    Raises:
        FlashGRPOError: with the reason.
    """
    model = config.model
    high = HIGH if model.transformer_low else expert_hint(model.transformer)
    for entry in model.frozen_loras:
        expert = entry.get("expert", "")
        check_origin(entry["file"], spec, expert if model.transformer_low else expert or high)
        said = expert_of(entry["file"])
        if model.transformer_low and not expert and said:
            raise FlashGRPOError(
                f"frozen LoRA {Path(entry['file']).name!r} is for the {said} expert by its header or "
                f"name, but goes on both: set expert = '{said}'"
            )
    for path, expert in ((model.continue_from, high), (model.continue_from_low, LOW)):
        if path:
            check_origin(path, spec, expert)


def merge_file(networks: Networks, path: str | Path, strength: float) -> None:
    """Add a LoRA file to the base weights: to the expert that it is for, or to all.

    Raises:
        FlashGRPOError: it was made for another family, or does not fit.
    """
    check_origin(path, networks.spec)
    pairs, expert = read_lora(path), expert_of(path)
    for name, policy in networks.policy.experts.items():
        if not name or expert in ("", name):
            merge_lora(policy.transformer, pairs, strength)


def continue_policy(policy: Policy, config: Config) -> None:
    """Start the policy from the configured LoRAs, which also become the reference policy.

    Raises:
        FlashGRPOError: a LoRA has another rank or other targets than the policy.
    """
    for name, expert in policy.trained.items():
        path = config.model.continue_from_low if name == LOW else config.model.continue_from
        if path:
            _continue(expert, path)


def _continue(policy: WanPolicy, path: str) -> None:
    policy.load(policy_weights(policy, read_lora(path)))
    policy.set_reference(policy.snapshot())


def latent_layout(networks: Networks) -> tuple[int, int]:
    """Latent channels of the transformer and pixels per latent of the VAE."""
    spatial = getattr(networks.vae.config, "scale_factor_spatial", None) or 8
    return networks.spec.out_channels, spatial
