"""How much memory and work a run takes, from shapes alone: no weight is loaded.

The networks are built on the meta device, with the storage, the LoRA and the checkpointing of the
configuration, and a rollout, a train step and a decoding run on them, see `memory_trace`. A
transformer is the same block again and again, so two short ones tell what each further block adds.
Weights, optimizer state and what is kept in main memory are added from their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .build import text_tokens, with_embedded_files
from .config import Config
from .memory_work import traced_work
from .model_shapes import ModelShapes, empty_policy, model_shapes
from .networks import pick_dtype, resting_storage
from .policy import WanPolicy, forwards_per_velocity
from .wan.detect import WanSpec
from .wan.storage import resident_bytes
from .wan.vae import TEMPORAL, empty_vae

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
    work = traced_work(full, shapes, dtype, vae_dtype, one_memory, images)

    experts, trained = _experts(full)
    size = _sizes(full, spec, dtype, one_memory)
    lora, swapped = size.lora, size.swapped
    rests = size.resident
    if model.shard and processes > 1:
        policy = empty_policy(full, spec, dtype, spec.num_layers, model.blocks_to_keep)
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

    judged = away + host + video + latents * full.eval.prompts * full.eval.seeds
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
        max(
            Phase("evaluate", sampling, adam, int(work.evaluate.peak), judged),
            Phase("evaluate", decoding, adam, int(work.decode.peak), judged),
            key=lambda phase: phase.device,
        ),
        Phase("checkpoint", sampling, adam, 0, away + host + trained * 4 * 5 * lora),
    ]
    if one_memory:
        # What elsewhere lies in main memory is in the same memory here.
        phases = [replace(p, working=p.working + p.host - away, host=0) for p in phases]
    return MemoryPlan(
        tuple(phases),
        size.parameters,
        lora,
        work.forward,
        work.train.flops / work.trained / forwards_per_velocity(full.rollout.guidance),
        work.decode.flops,
    )


@dataclass(frozen=True)
class _Sizes:
    """One transformer: bytes on the device with the LoRA, bytes swapped, and parameters."""

    resident: int
    swapped: int
    parameters: int
    lora: int


def _sizes(config: Config, spec: WanSpec, dtype: torch.dtype, one_memory: bool) -> _Sizes:
    """Sizes of the whole transformer from those of one and two blocks."""

    def measured(blocks: int, swap: int) -> tuple[int, int, int, int]:
        own = replace(config, model=replace(config.model, blocks_to_swap=swap))
        policy = empty_policy(own, replace(spec, num_layers=blocks), dtype, blocks, 0)
        every = list(policy.transformer.parameters())
        lora = sum(p.numel() for p in policy.parameters().values())
        rests = resident_bytes(policy.transformer)
        buffers = sum(b.nbytes for b in policy.transformer.buffers())
        total = sum(p.nbytes for p in every) + buffers
        return rests, total, sum(p.numel() for p in every) - lora, lora

    one, two, apart = measured(1, 0), measured(2, 0), measured(1, 1)
    blocks, swap = spec.num_layers, config.model.blocks_to_swap
    rests, total, count, lora = (a + (blocks - 1) * (b - a) for a, b in zip(one, two, strict=True))
    swapped = swap * (one[0] - apart[0])
    return _Sizes(total if one_memory else rests - swapped, swapped, count, lora)


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
