"""From a configuration to the things a trainer needs: networks, prompts, embeddings, reward."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import embedded
from .config import Config
from .config_io import flow_shift, sde_window, validate
from .control import Control
from .errors import FlashGRPOError
from .groups import choose_prompts
from .policy import WanPolicy, forwards_per_velocity, policy_weights
from .prompts import PromptSplit, disjoint_split, read_prompts, split_prompts
from .rewards.mix import RewardMix, default_terms, evaluation_terms
from .rollout import RolloutSettings
from .schedule import Schedule, make_schedule
from .wan.lora import merge_lora, read_lora
from .wan.text import cached_embeddings
from .wan.transformer import load_transformer
from .wan.vae import load_vae

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Networks:
    """The loaded networks of a run.

    Attributes:
        policy: transformer with LoRA.
        vae: the VAE.
        spec: architecture of the transformer, from its tensor shapes.
        device: compute device.
    """

    policy: WanPolicy
    vae: Any
    spec: Any
    device: torch.device


def with_embedded_files(config: Config) -> Config:
    """Replace `tiny` by the embedded files, where the configuration leaves them open."""
    if config.model.transformer != embedded.TINY:
        return config
    model = replace(
        config.model,
        transformer=str(embedded.TINY_TRANSFORMER),
        vae=config.model.vae or str(embedded.TINY_VAE),
        text_encoder=config.model.text_encoder or str(embedded.TINY_TEXT_ENCODER),
        text_tokens=config.model.text_tokens or embedded.TINY_TEXT_TOKENS,
    )
    prompts = config.prompts
    if not prompts.file:
        prompts = replace(
            prompts,
            file=str(embedded.TINY_PROMPTS["train"]),
            validation_file=prompts.validation_file or str(embedded.TINY_PROMPTS["validation"]),
            test_file=prompts.test_file or str(embedded.TINY_PROMPTS["test"]),
        )
    reward = config.reward
    if not reward.terms:
        reward = replace(reward, terms=default_terms(tiny=True))
    return replace(config, model=model, prompts=prompts, reward=reward)


def pick_device(name: str) -> torch.device:
    """The device of `model.device`.

    Raises:
        FlashGRPOError: the device does not exist here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise FlashGRPOError(
            f"model.device {name!r} is not available ({reason}): use auto or cpu"
        ) from None
    return device


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
    """Load transformer (with frozen LoRAs merged and the policy LoRA attached) and VAE.

    Args:
        config: the configuration.
        device: where the networks will run; None picks `model.device`.
        place: where the weights are put for now, by hosts that move them; None is `device`.

    Raises:
        FlashGRPOError: a file is missing, broken or of another model family.
    """
    from .files import open_tensors
    from .wan.detect import detect_transformer

    config = with_embedded_files(config)
    model = config.model
    if not model.vae:
        raise FlashGRPOError(
            "model.vae is empty: name the Wan VAE .safetensors file, e.g. wan_2.1_vae.safetensors"
        )
    device = device or pick_device(model.device)
    place = place or device
    dtype = pick_dtype(
        model.dtype, detect_transformer(open_tensors(model.transformer)).weight_dtype, device
    )
    transformer, spec = load_transformer(model.transformer, dtype, place)
    for entry in model.frozen_loras:
        merge_lora(transformer, read_lora(entry["file"]), float(entry.get("strength", 1.0)))
    policy = WanPolicy(
        transformer,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        targets=model.lora_targets,
        seed=config.run.seed,
        gradient_checkpointing=model.gradient_checkpointing,
    )
    if model.continue_from:
        continue_policy(policy, model.continue_from)
    vae_dtype = torch.float32 if device.type == "cpu" else dtype
    vae = load_vae(model.vae, vae_dtype, place)
    return Networks(policy, vae, spec, device)


def continue_policy(policy: WanPolicy, path: str) -> None:
    """Start the policy from an existing LoRA, which also becomes the reference policy.

    Raises:
        FlashGRPOError: the LoRA has another rank or other targets than the policy.
    """
    policy.load(policy_weights(policy, read_lora(path)))
    policy.set_reference(policy.snapshot())


def build_prompts(config: Config) -> PromptSplit:
    """Read and split the prompts of a run.

    Raises:
        FlashGRPOError: no file, an empty file, overlap, or too few training prompts.
    """
    config = with_embedded_files(config)
    p = config.prompts
    if not p.file:
        raise FlashGRPOError("prompts.file is empty: name a .txt file with one prompt per line")
    main = read_prompts(p.file)
    validation = read_prompts(p.validation_file) if p.validation_file else None
    test = read_prompts(p.test_file) if p.test_file else None
    split = split_prompts(
        main,
        0.0 if validation is not None else p.validation_share,
        0.0 if test is not None else p.test_share,
    )
    split = disjoint_split(
        split.train,
        split.validation if validation is None else validation,
        split.test if test is None else test,
    )
    if len(split.train) < 2:
        raise FlashGRPOError(
            f"only {len(split.train)} training prompt(s) in {p.file!r}: give at least 2, better 24 or more"
        )
    return split


def build_schedule(config: Config) -> Schedule:
    """The rollout schedule of a run."""
    return make_schedule(config.schedule.kind, config.schedule.steps, flow_shift(config))


def latent_shape(config: Config, channels: int = 16, spatial: int = 8) -> tuple[int, int, int, int]:
    """`(C, T, H, W)` of one video's latents: 4 frames per latent after the first."""
    r = config.rollout
    return channels, (r.frames - 1) // 4 + 1, r.height // spatial, r.width // spatial


def rollout_settings(config: Config, channels: int = 16, spatial: int = 8) -> RolloutSettings:
    """Rollout settings of a run for a model with these latents."""
    return RolloutSettings(
        latent_shape=latent_shape(config, channels, spatial),
        guidance=config.rollout.guidance,
        kind=config.schedule.sde,
        eta=config.schedule.eta,
        shared_prefix=config.rollout.shared_prefix,
        micro_batch=config.rollout.micro_batch,
    )


def latent_layout(networks: Networks) -> tuple[int, int]:
    """Latent channels of the transformer and pixels per latent of the VAE."""
    spatial = getattr(networks.vae.config, "scale_factor_spatial", None) or 8
    return networks.spec.out_channels, spatial


def build_reward(config: Config) -> RewardMix:
    """The training reward."""
    config = with_embedded_files(config)
    return RewardMix(config.reward.terms or default_terms(tiny=False), config.reward.on_nan)


def build_eval_reward(config: Config) -> RewardMix:
    """The evaluation reward: its own terms, or those of the training reward."""
    config = with_embedded_files(config)
    if any(term.get("group") for term in config.eval.terms):
        raise FlashGRPOError(
            "eval.terms has a win rate, which is 0.5 on average for every policy: leave out `group`"
        )
    terms = config.eval.terms or evaluation_terms(config.reward.terms)
    return RewardMix(terms or default_terms(tiny=False), config.reward.on_nan)


def text_tokens(config: Config) -> int:
    """Length of the text context."""
    return config.model.text_tokens or embedded.TEXT_TOKENS


def needed_texts(config: Config, split: PromptSplit) -> set[str]:
    """Every prompt text that a run will use, the negative prompt included."""
    count = config.rollout.prompts_per_iteration
    texts = {config.prompts.negative}
    total = len(split.train)
    epochs_needed = math.ceil(config.run.iterations * count / total)
    if epochs_needed > 1:
        texts.update(p.text for p in split.train)
    else:
        for iteration in range(1, config.run.iterations + 1):
            texts.update(
                split.train[i].text
                for i in choose_prompts(count, total, iteration, config.run.seed)
            )
    texts.update(p.text for p in split.validation[: config.eval.prompts])
    texts.update(p.text for p in split.test[: config.eval.test_prompts])
    return texts


def given_embeddings(
    config: Config, split: PromptSplit, embeddings: Mapping[str, torch.Tensor]
) -> Callable[[str], torch.Tensor]:
    """Look-up in embeddings that the host has made.

    Raises:
        FlashGRPOError: a prompt of the run is missing.
    """
    missing = sorted(needed_texts(config, split) - embeddings.keys())
    if missing:
        raise FlashGRPOError(
            f"{len(missing)} prompt(s) have no embedding, the first is {missing[0][:80]!r}: encode them too"
        )
    return embeddings.__getitem__


def embed_prompts(
    config: Config,
    split: PromptSplit,
    cache: Path,
    control: Control,
    device: torch.device,
) -> Callable[[str], torch.Tensor]:
    """Encode (or read from the cache) every prompt this run will use.

    Returns:
        prompt -> embedding `[tokens, 4096]`; the empty-prompt or negative one included.

    Raises:
        FlashGRPOError: no text encoder, or one that does not fit.
    """
    config = with_embedded_files(config)
    if not config.model.text_encoder:
        raise FlashGRPOError(
            "model.text_encoder is empty: name the UMT5 .safetensors file, e.g. umt5_xxl_fp8_e4m3fn_scaled.safetensors"
        )
    texts = needed_texts(config, split)
    encoder_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = cached_embeddings(
        sorted(texts),
        config.model.text_encoder,
        text_tokens(config),
        cache,
        encoder_dtype,
        device,
        control,
    )
    return found.__getitem__


def preflight(config: Config, *, files: bool = True) -> None:
    """Check what can be checked in a moment, before a run folder exists or a network is loaded.

    Args:
        config: the configuration.
        files: also look at the model files (a host that has loaded them need not).

    Raises:
        FlashGRPOError: naming the value and the fix.
    """
    from .files import open_tensors
    from .wan.detect import detect_transformer

    validate(config)
    full = with_embedded_files(config)
    if files:
        detect_transformer(open_tensors(full.model.transformer))
        if not full.model.vae:
            raise FlashGRPOError(
                "model.vae is empty: name the Wan VAE .safetensors file, e.g. wan_2.1_vae.safetensors"
            )
        pick_device(full.model.device)
        for entry in full.model.frozen_loras:
            read_lora(entry["file"])
        if full.model.continue_from:
            ranks = {pair.rank for pair in read_lora(full.model.continue_from).values()}
            if ranks != {full.model.lora_rank}:
                raise FlashGRPOError(
                    f"model.continue_from = {full.model.continue_from!r} has rank "
                    f"{', '.join(str(r) for r in sorted(ranks))}, model.lora_rank is "
                    f"{full.model.lora_rank}: use the same rank"
                )
    build_prompts(full)
    build_reward(full)
    build_eval_reward(full)


@dataclass(frozen=True)
class Plan:
    """Counts of a run, before anything is loaded.

    Attributes:
        videos_per_iteration: rollouts of one iteration.
        forwards_per_iteration: mean transformer forwards (per video) of sampling an iteration.
        train_forwards_per_iteration: forwards with a backward pass.
        evaluations: validation evaluations, the first one included.
        evaluation_forwards: forwards of all evaluations and the final test.
        total_forwards: all forwards, a training forward and backward counted as 3.
        latent_shape: `(C, T, H, W)`.
        disk_bytes: upper estimate of the run folder.
        prompts: number of training, validation and test prompts.
    """

    videos_per_iteration: int
    forwards_per_iteration: float
    train_forwards_per_iteration: float
    evaluations: int
    evaluation_forwards: int
    total_forwards: float
    latent_shape: tuple[int, int, int, int]
    disk_bytes: int
    prompts: dict[str, int]


def plan(config: Config, lora_parameters: int = 0) -> Plan:
    """Resolve a configuration into counts; reads prompts, loads no network.

    Args:
        config: the configuration.
        lora_parameters: number of LoRA parameters, for the disk estimate.
    """
    validate(config)
    split = build_prompts(config)
    settings = rollout_settings(config)
    per = forwards_per_velocity(settings.guidance)
    steps, window, r = config.schedule.steps, sde_window(config), config.rollout
    groups, size = r.prompts_per_iteration, r.group_size
    if r.noise == "shared" and r.shared_prefix:
        prefix = sum(range(window[0] + 1, window[1] + 1)) / (window[1] - window[0])
        sampling, training = groups * (prefix + size * (steps - prefix)), groups
    else:
        sampling, training = groups * size * steps, groups * size
    every, e = config.eval.every, config.eval
    evaluations = (config.run.iterations // every + 1) if every else 0
    shown = min(e.prompts, len(split.validation)) * e.seeds
    # Each evaluation judges the policy; the starting policy is judged once.
    judged = shown * evaluations + 2 * min(e.test_prompts, len(split.test)) * e.test_seeds
    evaluation_forwards = judged * steps * per
    total = config.run.iterations * (sampling + 3 * training) * per + evaluation_forwards
    checkpoint = 4 * lora_parameters * 4
    video = r.width * r.height * r.frames // 8
    disk = checkpoint * (config.run.save_every and config.run.keep + 2) + video * min(judged, 200)
    return Plan(
        groups * size,
        sampling * per,
        training * per,
        evaluations,
        evaluation_forwards,
        total,
        settings.latent_shape,
        disk,
        {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)},
    )
