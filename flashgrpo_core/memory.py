"""How much memory and work a run takes, from shapes alone: no weight is loaded.

The networks are built on the meta device, with the storage, the LoRA and the checkpointing of the
configuration, and a rollout, a train step and a decoding run on them, see `memory_trace`. A
transformer is the same block again and again, so two short ones tell what each further block adds.
Weights, optimizer state and what is kept in main memory are added from their sizes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .build import rollout_settings, text_tokens, with_embedded_files
from .conditioning import StartImage, blank_image
from .config import Config
from .config_io import flow_shift
from .groups import PromptGroup
from .memory_trace import Trace
from .model_shapes import ModelShapes, empty_policy, model_shapes
from .networks import pick_dtype, resting_storage
from .policy import WanPolicy, forwards_per_velocity
from .rollout import RolloutSampler
from .schedule import make_schedule
from .sde import log_prob, transition_mean
from .wan.decode import decode_latents
from .wan.storage import resident_bytes
from .wan.vae import TEMPORAL, empty_vae, encode_pixels

#: Main memory that a video takes while it is decoded and scored, in bytes per pixel and frame.
VIDEO_BYTES = 3 + 4 * 3


@dataclass(frozen=True)
class Phase:
    """What one phase of a run holds at its peak, in bytes.

    Attributes:
        name: `load`, `encode`, `rollout`, `score`, `update`, `evaluate` or `checkpoint`.
        weights: networks on the device.
        kept: what lies on the device between phases: optimizer state, graphs kept for the update.
        working: activations, gradients and the working memory of kernels.
        host: main memory beyond Python and its libraries; on the CPU part of the same memory, and 0.
    """

    name: str
    weights: int
    kept: int
    working: int
    host: int

    @property
    def device(self) -> int:
        """Peak on the device."""
        return self.weights + self.kept + self.working


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory and work of a run.

    Attributes:
        phases: in the order in which they come.
        parameters: parameters of one transformer, its LoRA not counted.
        lora_parameters: of one trained transformer.
        forward_flops: floating-point operations of a forward of one video without gradient.
        train_flops: of a forward with its backward pass, recomputation included.
        decode_flops: of decoding one video.
    """

    phases: tuple[Phase, ...]
    parameters: int
    lora_parameters: int
    forward_flops: float
    train_flops: float
    decode_flops: float

    @property
    def peak(self) -> Phase:
        """The phase that needs most on the device."""
        return max(self.phases, key=lambda phase: phase.device)

    @property
    def host(self) -> int:
        """Peak of main memory."""
        return max(phase.host for phase in self.phases)


@dataclass(frozen=True)
class _Measured:
    """Peak bytes, bytes at a mark, and floating-point operations of a traced computation."""

    peak: float
    mark: float
    flops: float

    def further(self, other: _Measured, steps: int) -> _Measured:
        """This plus `steps` times the difference from `other` to this."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return _Measured(*(a + steps * (a - b) for a, b in pairs))

    def plus(self, other: _Measured, base: _Measured) -> _Measured:
        """This plus what `other` has more than `base`."""
        triples = zip(*(dataclasses.astuple(m) for m in (self, other, base)), strict=True)
        return _Measured(*(a + b - c for a, b, c in triples))


@dataclass(frozen=True)
class _Work:
    """What the traced computations of a run take."""

    sample: _Measured
    evaluate: _Measured
    train: _Measured
    decode: _Measured
    image: _Measured
    forward: float
    trained: int


def plan_memory(
    config: Config,
    shapes: ModelShapes | None = None,
    device: torch.device | str = "cuda",
    images: bool | None = None,
    prompts: int = 0,
    processes: int = 1,
    streamed: bool = False,
) -> MemoryPlan:
    """Predict the memory of every phase of a run.

    Args:
        config: the configuration.
        shapes: the networks; None reads the headers of the configured files.
        device: where the run is planned; it need not be there.
        images: whether prompts have a start image; None is what the model may meet.
        prompts: number of prompts, whose embeddings stay in main memory.
        processes: number of processes that the weights are spread over with `model.shard`.
        streamed: the text encoder's layers rest in main memory, as they do when it does not fit.

    Raises:
        FlashGRPOError: see `model_shapes`.
    """
    full = with_embedded_files(config)
    shapes = shapes or model_shapes(full)
    device = torch.device(device)
    spec, model = shapes.spec, full.model
    one_memory = device.type == "cpu"
    dtype = pick_dtype(model.dtype, spec.weight_dtype, device)
    vae_dtype = torch.float32 if one_memory else dtype
    storage = resting_storage(model.storage, spec, device)
    full = replace(full, model=replace(model, storage=storage))
    work = _work(full, shapes, dtype, vae_dtype, one_memory, images)

    experts, trained = _experts(full)
    policy = empty_policy(full, spec, dtype, spec.num_layers, model.blocks_to_keep)
    lora = sum(p.numel() for p in policy.parameters().values())
    every = sum(p.nbytes for p in policy.transformer.parameters())
    rests = every if one_memory else resident_bytes(policy.transformer)
    swapped = every - rests
    frozen = sum(p.numel() for p in policy.transformer.parameters()) - lora
    if model.shard and processes > 1:
        rests = sharding_plan(policy, processes).device_bytes
    network = [rests - (0 if i < trained else 4 * lora) for i in range(experts)]
    vae = sum(p.numel() for p in empty_vae(shapes.vae).parameters()) * vae_dtype.itemsize
    networks = sum(network) + vae
    alone = model.offload and not one_memory
    sampling = max(network) if alone else networks
    decoding = (vae if alone else networks) + shapes.reward_bytes
    adam = trained * (2 if full.optim.kind == "adamw8bit" else 8) * lora  # two moments
    gradients = trained * 8 * lora  # summed in float64
    graphs = 0 if alone else _graphs(full, int(work.train.mark))
    keeps = not alone and full.rollout.keep_graph > 0

    r = full.rollout
    videos = r.prompts_per_iteration * r.group_size
    latents = 4 * _latents(full, spec.out_channels, shapes.spatial)
    shared = r.noise == "shared" and r.shared_prefix
    rollouts = latents * (2 * videos + (r.prompts_per_iteration if shared else videos))
    embeddings = 4 * prompts * text_tokens(full) * spec.text_dim
    host = embeddings + trained * 4 * lora + (0 if one_memory else experts * swapped)
    video = r.width * r.height * r.frames * r.decode_batch * VIDEO_BYTES
    away = networks if alone else 0  # while one network is on the device
    itemsize = 4 if one_memory else 2
    encoder = shapes.encoder_parameters * itemsize
    encoding = shapes.encoder_work(text_tokens(full), itemsize)
    if streamed and not one_memory:
        away, encoder = away + encoder, shapes.encoder_streamed * itemsize
    clip = 4 * shapes.clip_parameters

    phases = [
        Phase("load", 0 if alone else networks, 0, shapes.largest_tensor, away + host),
        Phase(
            "encode",
            0 if alone else networks,
            0,
            max(encoder + encoding, clip + (vae if alone else 0) + int(work.image.peak)),
            away + host,
        ),
        Phase(
            "rollout",
            sampling,
            adam + graphs,
            int(max(work.sample.peak, work.train.mark if keeps else 0)),
            away + host + rollouts,
        ),
        Phase(
            "score", decoding, adam + graphs, int(work.decode.peak), away + host + rollouts + video
        ),
        Phase(
            "update",
            sampling,
            adam + max(graphs - int(work.train.mark), 0),
            int(max(work.train.peak + gradients, gradients + trained * 4 * lora)),
            away + host + rollouts,
        ),
        Phase(
            "evaluate",
            max(sampling, decoding),
            adam,
            int(max(work.evaluate.peak, work.decode.peak)),
            away + host + video + latents * full.eval.prompts * full.eval.seeds,
        ),
        Phase("checkpoint", sampling, adam, 0, away + host + trained * 4 * 5 * lora),
    ]
    if one_memory:
        # What elsewhere lies in main memory is in the same memory here.
        phases = [replace(p, working=p.working + p.host - away, host=0) for p in phases]
    return MemoryPlan(
        tuple(phases),
        frozen,
        lora,
        work.forward,
        work.train.flops / work.trained / forwards_per_velocity(full.rollout.guidance),
        work.decode.flops,
    )


@dataclass(frozen=True)
class ShardingPlan:
    """How the frozen parameters of one transformer lie on the ranks.

    Attributes:
        parameters: per rank.
        device_bytes: most that a rank holds: its part, two gathered blocks, and the whole LoRA.
    """

    parameters: tuple[int, ...]
    device_bytes: int


def sharding_plan(policy: WanPolicy, processes: int) -> ShardingPlan:
    """What FSDP2 gives to each rank: every parameter is cut along its first dimension.

    Args:
        policy: on the meta device.
        processes: number of ranks.
    """
    lora = {id(p) for p in policy.parameters().values()}
    counts, sizes = [0] * processes, [0] * processes
    for parameter in policy.transformer.parameters():
        if id(parameter) in lora:
            continue
        for rank, part in enumerate(parameter.chunk(processes)):
            counts[rank] += part.numel()
            sizes[rank] += part.numel() * parameter.itemsize
    network: Any = policy.transformer
    block = sum(p.nbytes for p in network.blocks[0].parameters() if id(p) not in lora)
    whole = sum(p.nbytes for p in policy.parameters().values())
    return ShardingPlan(tuple(counts), max(sizes) + 2 * block + whole)


def _experts(config: Config) -> tuple[int, int]:
    """Number of transformers, and of those that are trained."""
    if not config.model.transformer_low:
        return 1, 1
    return 2, 2 if config.model.train_experts == "both" else 1


def _latents(config: Config, channels: int, spatial: int) -> int:
    r = config.rollout
    return (
        channels * ((r.frames - 1) // TEMPORAL + 1) * (r.height // spatial) * (r.width // spatial)
    )


def _graphs(config: Config, size: int) -> int:
    """Bytes of the graphs that are kept from the rollout for the update."""
    limit, r = int(config.rollout.keep_graph * 2**30), config.rollout
    if size == 0 or size > limit:
        return 0
    shared = r.noise == "shared" and r.shared_prefix
    units = r.prompts_per_iteration * (1 if shared else -(-r.group_size // r.micro_batch))
    return min(units, limit // size) * size


_KNOWN: dict[str, _Work] = {}


def _work(
    config: Config,
    shapes: ModelShapes,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    one_memory: bool,
    images: bool | None,
) -> _Work:
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
) -> _Work:
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

    def by_blocks(run: Callable[[WanPolicy, Trace], float]) -> _Measured:
        def measure(blocks: int, keep: int) -> _Measured:
            policy = empty_policy(config, spec, dtype, blocks, keep)
            trace = Trace(one_memory)
            trace.know([*policy.transformer.parameters(), *policy.transformer.buffers(), context])
            with trace:
                mark = run(policy, trace)
            return _Measured(trace.peak, mark, trace.flops)

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
    return _Work(
        sample=sampled,
        evaluate=by_blocks(lambda policy, trace: sample(policy, trace, seeds)) if more else sampled,
        train=by_blocks(train),
        decode=_decode(config, shapes, vae_dtype, one_memory),
        image=_encode_image(config, shapes, vae_dtype, one_memory, image is not None),
        forward=sampled.flops / velocities / forwards_per_velocity(r.guidance),
        trained=1 if whole else batch,
    )


def _empty_vae(shapes: ModelShapes, dtype: torch.dtype) -> Any:
    return empty_vae(shapes.vae).to(dtype).eval().requires_grad_(False)


def _decode(config: Config, shapes: ModelShapes, dtype: torch.dtype, one_memory: bool) -> _Measured:
    """Decoding a few latent frames; each further one is the same again."""
    r, vae = config.rollout, _empty_vae(shapes, dtype)
    frames = (r.frames - 1) // TEMPORAL + 1
    side = config.model.vae_tile or max(r.width, r.height)
    height, width = min(r.height, side) // shapes.spatial, min(r.width, side) // shapes.spatial
    area = r.height * r.width / (height * width * shapes.spatial**2)

    def measure(frames: int) -> _Measured:
        trace = Trace(one_memory)
        trace.know(vae.parameters())
        shape = (r.decode_batch, shapes.vae.z_dim, frames, height, width)
        with trace:
            decode_latents(vae, torch.zeros(shape, device="meta"))
        return _Measured(trace.peak, 0.0, area * trace.flops / r.decode_batch)

    if frames <= 3:
        return measure(frames)
    three = measure(3)
    return replace(three, flops=three.further(measure(2), frames - 3).flops)


@torch.no_grad()
def _encode_image(
    config: Config, shapes: ModelShapes, dtype: torch.dtype, one_memory: bool, needed: bool
) -> _Measured:
    if not needed:
        return _Measured(0.0, 0.0, 0.0)
    r, vae, trace = config.rollout, _empty_vae(shapes, dtype), Trace(one_memory)
    trace.know(vae.parameters())
    frames = min(r.frames, 2 * TEMPORAL + 1)
    with trace:
        encode_pixels(vae, torch.zeros(1, 3, frames, r.height, r.width, device="meta"))
    # The whole video goes in at once.
    more = 3 * (r.frames - frames) * r.height * r.width * (4 + dtype.itemsize)
    return _Measured(trace.peak + more, 0.0, trace.flops)
