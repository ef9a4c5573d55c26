"""From a configuration to the things a trainer needs: networks, prompts, embeddings, reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import embedded
from .adam import check_installed
from .conditioning import StartImage, check_images
from .config import Config
from .config_io import flow_shift, validate
from .control import Control
from .embedded import with_embedded_files
from .errors import FlashGRPOError
from .experts import switch_step
from .forwards import group_forwards, velocity_forwards
from .groups import choose_prompts
from .networks import (
    Networks,
    check_loras,
    latent_layout,
    load_networks,
    model_spec,
    pick_device,
    pick_dtype,
)
from .policy import forwards_per_velocity
from .prompts import Prompt, PromptSplit, disjoint_split, read_prompts, split_prompts
from .rewards.mix import RewardMix, default_terms, evaluation_terms
from .rollout import RolloutSettings
from .schedule import Schedule, make_schedule
from .strategies import possible_steps
from .wan.lora import read_lora
from .wan.start_image import ImageEncoder, cached_start_images
from .wan.text import cached_embeddings
from .windows import expert_boundary, sde_windows

__all__ = [
    "Networks",
    "latent_layout",
    "load_networks",
    "pick_device",
    "pick_dtype",
    "with_embedded_files",
]


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
    """Rollout settings of a run for a model with these latents.

    Raises:
        FlashGRPOError: the size does not fill the transformer's patches of 2x2 latents, or a
            guidance for an expert that is not there.
    """
    if config.rollout.guidance_low and not config.model.transformer_low:
        raise FlashGRPOError(
            f"rollout.guidance_low = {config.rollout.guidance_low:g} is for the low-noise expert of "
            "a model with two: set it to 0, or name model.transformer_low"
        )
    patch = 2 * spatial
    for name, side in (("width", config.rollout.width), ("height", config.rollout.height)):
        if side % patch:
            raise FlashGRPOError(
                f"{name} {side} is not divisible by {patch}, which this model needs: use "
                f"{max(side // patch, 1) * patch} or {-(-side // patch) * patch}"
            )
    return RolloutSettings(
        latent_shape=latent_shape(config, channels, spatial),
        guidance=config.rollout.guidance,
        kind=config.schedule.sde,
        eta=config.schedule.eta,
        shared_prefix=config.rollout.shared_prefix,
        micro_batch=config.rollout.micro_batch,
        guidance_low=config.rollout.guidance_low,
        suffix_share=config.rollout.suffix_share,
        guidance_interval=tuple(config.rollout.guidance_interval),
        guidance_batched=config.rollout.guidance_batched,
        cache_threshold=config.rollout.cache_threshold,
    )


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


def needed_prompts(config: Config, split: PromptSplit) -> list[Prompt]:
    """Every prompt that a run will use, each once."""
    count, total = config.rollout.prompts_per_iteration, len(split.train)
    found: dict[Prompt, None] = {}
    adaptive = config.prompts.sampling == "adaptive"
    if adaptive or math.ceil(config.run.iterations * count / total) > 1:
        found.update(dict.fromkeys(split.train))
    else:
        for iteration in range(1, config.run.iterations + 1):
            chosen = choose_prompts(count, total, iteration, config.run.seed)
            found.update(dict.fromkeys(split.train[i] for i in chosen))
    found.update(dict.fromkeys(split.validation[: config.eval.prompts]))
    found.update(dict.fromkeys(split.test[: config.eval.test_prompts]))
    return list(found)


def needed_texts(config: Config, split: PromptSplit) -> set[str]:
    """Every prompt text that a run will use, the negative prompt included."""
    return {config.prompts.negative} | {p.text for p in needed_prompts(config, split)}


def start_images(
    config: Config, networks: Networks, prompts: Sequence[Prompt], cache: Path, control: Control
) -> Callable[[str], StartImage] | None:
    """Encode (or find in the cache) the start images of some prompts.

    Returns:
        Path -> its encoding, or None when no prompt has an image.

    Raises:
        FlashGRPOError: model and prompts do not agree about images, or one cannot be read.
    """
    check_images(networks.spec, [p.image for p in prompts])
    paths = [p.image for p in prompts if p.image is not None]
    if not paths:
        return None
    full, r = with_embedded_files(config), config.rollout
    encoder = ImageEncoder(
        networks.spec,
        networks.vae,
        full.model.vae,
        full.model.clip_vision,
        (r.width, r.height, r.frames),
        networks.device,
    )
    return cached_start_images(paths, encoder, cache, control)


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
    validate(config)
    full = with_embedded_files(config)
    spec = model_spec(full) if files else None
    if spec is not None:
        if not full.model.vae:
            raise FlashGRPOError(
                "model.vae is empty: name the Wan VAE .safetensors file, e.g. wan_2.1_vae.safetensors"
            )
        pick_device(full.model.device)
        for setting in ("blocks_to_swap", "blocks_to_keep"):
            if getattr(full.model, setting) > spec.num_layers:
                raise FlashGRPOError(
                    f"model.{setting} = {getattr(full.model, setting)}, but this model has "
                    f"{spec.num_layers} blocks: use 0 to {spec.num_layers}"
                )
        check_installed(full.optim)
        check_loras(full, spec)
        for entry in full.model.frozen_loras:
            read_lora(entry["file"])
        for setting in ("continue_from", "continue_from_low"):
            path = getattr(full.model, setting)
            ranks = {pair.rank for pair in read_lora(path).values()} if path else set()
            if path and ranks != {full.model.lora_rank}:
                raise FlashGRPOError(
                    f"model.{setting} = {path!r} has rank "
                    f"{', '.join(str(r) for r in sorted(ranks))}, model.lora_rank is "
                    f"{full.model.lora_rank}: use the same rank"
                )
        sde_windows(full)
        rollout_settings(full, *_planned_layout(full))
    prompts = build_prompts(full)
    if full.loss.kl_on_drop > 0 and not prompts.validation:
        raise FlashGRPOError(
            "loss.kl_on_drop waits for validation evaluations, and no prompt is held out: set "
            "prompts.validation_share above 0, or name prompts.validation_file"
        )
    if spec is not None:
        check_images(spec, [p.image for p in needed_prompts(full, prompts)])
    build_reward(full).check_prompts(p.text for p in prompts.train)
    build_eval_reward(full).check_prompts(p.text for p in (*prompts.validation, *prompts.test))


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
    settings = rollout_settings(config, *_planned_layout(config))
    schedule = build_schedule(config)
    guidance = _step_guidance(config, settings)
    cost = velocity_forwards(schedule, settings, guidance)
    r = config.rollout
    groups, size = r.prompts_per_iteration, r.group_size
    s = config.schedule
    shared = r.noise == "shared" and r.shared_prefix and s.strategy != "mixed"
    two = bool(config.model.transformer_low)
    videos = 1 if shared else size
    last = switch_step(schedule, expert_boundary(config)) if two else 0

    def sampled(own: tuple[int, ...], shared: bool) -> int:
        return group_forwards(schedule, settings, guidance, own, size, shared, last)

    sampling = training = 0.0
    windows = list(sde_windows(config).values())
    if config.loss.algorithm == "nft":
        sampling = groups * sampled((), False)
        training = groups * size * config.loss.nft_levels * sum(cost) / len(cost)
        windows = []
    for first, end in windows:
        choices = possible_steps(s.strategy, (first, end), s.train_steps, s.place)
        share = groups / len(windows) / len(choices)
        for own in choices:
            sampling += share * sampled(own, shared)
            training += share * (videos * cost[own[0]] + size * sum(cost[k] for k in own[1:]))
    every, e = config.eval.every, config.eval
    evaluations = (config.run.iterations // every + 1) if every else 0
    shown = min(e.prompts, len(split.validation)) * e.seeds
    # Each evaluation judges the policy; the starting policy is judged once.
    judged = shown * evaluations + 2 * min(e.test_prompts, len(split.test)) * e.test_seeds
    evaluation_forwards = judged * sum(forwards_per_velocity(scale) for scale in guidance)
    total = config.run.iterations * (sampling + 3 * training) + evaluation_forwards
    checkpoint = 4 * lora_parameters * 4
    video = r.width * r.height * r.frames // 8
    disk = checkpoint * (config.run.save_every and config.run.keep + 2) + video * min(judged, 200)
    return Plan(
        groups * size,
        sampling,
        training,
        evaluations,
        evaluation_forwards,
        total,
        settings.latent_shape,
        disk,
        {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)},
    )


def _planned_layout(config: Config) -> tuple[int, int]:
    """Latent channels and pixels per latent, as far as the model's file is at hand."""
    path = with_embedded_files(config).model.transformer
    channels = model_spec(config).out_channels if Path(path).exists() else 16
    return channels, 16 if channels == 48 else 8


def _step_guidance(config: Config, settings: RolloutSettings) -> list[float]:
    """Guidance scale of the network of each step."""
    steps = config.schedule.steps
    if not config.model.transformer_low:
        return [settings.guidance] * steps
    switch = switch_step(build_schedule(config), expert_boundary(config))
    low = settings.guidance_low or settings.guidance
    return [settings.guidance] * switch + [low] * (steps - switch)
