"""What a run's computations take, traced on short networks and drawn out to the whole model.

A transformer is the same block again and again, so two short ones tell what each further block adds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .build import rollout_settings, text_tokens
from .conditioning import StartImage, blank_image
from .config import Config
from .config_io import flow_shift
from .groups import PromptGroup
from .memory_trace import Trace
from .model_shapes import ModelShapes, empty_policy
from .policy import WanPolicy, forwards_per_velocity
from .rollout import RolloutSampler
from .schedule import make_schedule
from .sde import log_prob, transition_mean
from .wan.decode import decode_pieces
from .wan.vae import TEMPORAL, empty_vae, encode_pixels


@dataclass(frozen=True)
class Measured:
    """Peak bytes, bytes at a mark, and floating-point operations of a traced computation."""

    peak: float
    mark: float
    flops: float

    def further(self, other: Measured, steps: int) -> Measured:
        """This plus `steps` times the difference from `other` to this."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Measured(*(a + steps * (a - b) for a, b in pairs))

    def plus(self, other: Measured, base: Measured) -> Measured:
        """This plus what `other` has more than `base`."""
        triples = zip(*(dataclasses.astuple(m) for m in (self, other, base)), strict=True)
        return Measured(*(a + b - c for a, b, c in triples))


@dataclass(frozen=True)
class Work:
    """What the traced computations of a run take.

    Attributes:
        sample: sampling a micro-batch.
        evaluate: sampling a prompt's videos for an evaluation.
        train: a trained forward with its backward pass; marked is what autograd keeps between them.
        decode: decoding; the operations are of one video.
        image: encoding a start image.
        forward: operations of a forward of one video without gradient.
        trained: videos in `train`.
    """

    sample: Measured
    evaluate: Measured
    train: Measured
    decode: Measured
    image: Measured
    forward: float
    trained: int


_KNOWN: dict[str, Work] = {}


def traced_work(
    config: Config,
    shapes: ModelShapes,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    one_memory: bool,
    images: bool | None,
) -> Work:
    """Trace everything once for each set of settings that matters."""
    model, blocks = config.model, shapes.spec.num_layers
    swap = model.blocks_to_swap
    kinds = (swap < blocks, swap > 0)
    tables = [
        {**dataclasses.asdict(model), "blocks_to_swap": 0, "offload": False, "device": ""},
        {**dataclasses.asdict(config.rollout), "keep_graph": 0.0},
        dataclasses.asdict(config.schedule),
        config.eval.seeds,
    ]
    key = json.dumps([str(shapes), str(dtype), str(vae_dtype), one_memory, images, kinds, tables])
    if key not in _KNOWN:
        _KNOWN[key] = _trace_all(config, shapes, dtype, vae_dtype, one_memory, images)
    return _KNOWN[key]


def _trace_all(
    config: Config,
    shapes: ModelShapes,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    one_memory: bool,
    images: bool | None,
) -> Work:
    spec, r = shapes.spec, config.rollout
    settings = rollout_settings(config, spec.out_channels, shapes.spatial)
    shape = settings.latent_shape
    image = blank_image(spec, shape)
    if image is None and spec.family == "wan2.2-ti2v-5b" and images is not False:
        image = StartImage(first=torch.zeros(shape[0], 1, *shape[2:]))
    context = torch.zeros(text_tokens(config), spec.text_dim)
    schedule = make_schedule(config.schedule.kind, 2, flow_shift(config))
    whole = r.noise == "shared" and r.shared_prefix

    def sampler_of(policy: WanPolicy) -> RolloutSampler:
        return RolloutSampler(
            policy,
            schedule,
            settings,
            lambda prompt: context,
            context if settings.guided else None,
            images=None if image is None else lambda path: image,
        )

    def group_of(size: int) -> PromptGroup:
        noise = (1,) * size if r.noise == "shared" else tuple(range(size))
        return PromptGroup("", "", 0, noise, tuple(range(size)), "" if image else None)

    def sample(policy: WanPolicy, trace: Trace, size: int) -> float:
        sampler_of(policy).sample(group_of(size), range(size))
        return 0.0

    def train(policy: WanPolicy, trace: Trace) -> float:
        size = r.group_size if whole else min(r.micro_batch, r.group_size)
        sampler, group = sampler_of(policy), group_of(size)
        latents = torch.zeros(1 if whole else size, *shape, device="meta")
        step = sampler.transition(group)
        velocity = sampler.velocity(group, latents)
        kept = trace.live
        after = torch.zeros(size, *shape, device="meta")
        log_prob(step, after, transition_mean(step, latents, velocity)).sum().backward()
        return float(kept)

    def by_blocks(run: Callable[[WanPolicy, Trace], float]) -> Measured:
        def measure(blocks: int, keep: int) -> Measured:
            policy = empty_policy(config, spec, dtype, blocks, keep)
            trace = Trace(one_memory)
            trace.know([*policy.transformer.parameters(), *policy.transformer.buffers(), context])
            with trace:
                mark = run(policy, trace)
            return Measured(trace.peak, mark, trace.flops)

        blocks = spec.num_layers
        keep = min(config.model.blocks_to_keep, blocks) * config.model.gradient_checkpointing
        if blocks <= 4:
            return measure(blocks, keep)
        if keep in (0, blocks):
            return measure(3, min(keep, 3)).further(measure(2, min(keep, 2)), blocks - 3)
        few = min(keep, 2)
        found = measure(few + 2, few)  # two that recompute, `few` that keep
        recompute = found.further(measure(few + 1, few), blocks - keep - 2)
        if keep == few:
            return recompute
        more = measure(few + 3, few + 1).further(found, keep - few - 1)
        return recompute.plus(more, found)

    batch = min(r.micro_batch, r.group_size)
    seeds = min(r.micro_batch, config.eval.seeds)
    sampled = by_blocks(lambda policy, trace: sample(policy, trace, batch))
    more = seeds > batch
    velocities = 1 + batch if whole else 2 * batch  # two steps, the first perhaps shared
    return Work(
        sample=sampled,
        evaluate=by_blocks(lambda policy, trace: sample(policy, trace, seeds)) if more else sampled,
        train=by_blocks(train),
        decode=_decode(config, shapes, vae_dtype, one_memory),
        image=_encode_image(config, shapes, vae_dtype, one_memory, image is not None),
        forward=sampled.flops / velocities / forwards_per_velocity(r.guidance),
        trained=1 if whole else batch,
    )


def _meta_vae(shapes: ModelShapes, dtype: torch.dtype) -> Any:
    # The library's own `to` warns of every cast.
    return nn.Module.to(empty_vae(shapes.vae), dtype).eval().requires_grad_(False)


@torch.no_grad()
def _decode(config: Config, shapes: ModelShapes, dtype: torch.dtype, one_memory: bool) -> Measured:
    """Decoding a few latent frames; each further one is the same again."""
    r, vae = config.rollout, _meta_vae(shapes, dtype)
    frames = (r.frames - 1) // TEMPORAL + 1
    side = config.model.vae_tile or max(r.width, r.height)
    height, width = min(r.height, side) // shapes.spatial, min(r.width, side) // shapes.spatial
    area = r.height * r.width / (height * width * shapes.spatial**2)

    def measure(frames: int) -> Measured:
        trace = Trace(one_memory)
        trace.know(vae.parameters())
        shape = (r.decode_batch, shapes.vae.z_dim, frames, height, width)
        with trace:
            for _ in decode_pieces(vae, torch.zeros(shape, device="meta")):
                pass
        return Measured(trace.peak, 0.0, area * trace.flops / r.decode_batch)

    if frames <= 3:
        return measure(frames)
    three = measure(3)
    return replace(three, flops=three.further(measure(2), frames - 3).flops)


@torch.no_grad()
def _encode_image(
    config: Config, shapes: ModelShapes, dtype: torch.dtype, one_memory: bool, needed: bool
) -> Measured:
    if not needed:
        return Measured(0.0, 0.0, 0.0)
    r, vae, trace = config.rollout, _meta_vae(shapes, dtype), Trace(one_memory)
    trace.know(vae.parameters())
    frames = min(r.frames, 2 * TEMPORAL + 1)
    with trace:
        encode_pixels(vae, torch.zeros(1, 3, frames, r.height, r.width, device="meta"))
    # The whole video goes in at once.
    more = 3 * (r.frames - frames) * r.height * r.width * (4 + dtype.itemsize)
    return Measured(trace.peak + more, 0.0, trace.flops)
