"""Whether a run fits a card, and which settings to change when it does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .config import Config
from .embedded import with_embedded_files
from .errors import FlashGRPOError
from .memory import MemoryPlan, Phase, plan_memory
from .model_shapes import ModelShapes, model_shapes

#: Cards by their memory. A card of 12 GB has 12.9 * 10^9 bytes; counted are 12 * 10^9, so that the
#: rest is left to the CUDA context and the desktop.
CARDS = (12, 16, 24, 48, 80)
#: Room for what is not modelled: the allocator's gaps and kernels that take more than foreseen.
MARGIN = 1.1
#: Share of the prediction that must not fit before training is refused: it may err by 10 %.
REFUSE = 0.9
#: Share of the largest phase that a change must save to be worth naming.
USEFUL = 0.05
#: Changes that are planned before a run is refused; a plan takes one to three seconds.
TRIES = 3
#: Runs whose networks and tokens are this small are not worth a plan on the CPU.
SMALL_BYTES = 2_000_000_000

Changes = dict[str, Any]


@dataclass(frozen=True)
class Fit:
    """How a run fits a card.

    Attributes:
        card_gb: the card, in 10^9 bytes.
        plan: with the changes applied.
        changes: settings to change, `table.key` -> value; empty when it fits as it is.
        fits: whether it then fits.
        streamed: the text encoder is too large for the card, its layers rest in main memory.
    """

    card_gb: float
    plan: MemoryPlan
    changes: Changes
    fits: bool
    streamed: bool


def needed(plan: MemoryPlan) -> int:
    """Bytes that a device should have for a plan, the margin included."""
    return int(MARGIN * plan.peak.device)


def fit(
    config: Config,
    shapes: ModelShapes,
    card_gb: float,
    tries: int = 0,
    plans: dict[str, MemoryPlan] | None = None,
    **given: Any,
) -> Fit:
    """The least harmful changes that make a run fit a card.

    Changes that leave every number as it is come first, then those that cost time, then those that
    round, then those that make another video. A change counts when it makes the run fit or takes a
    useful share off the phase that needs most, and is dropped again when later ones do without it.

    Args:
        config: the configuration.
        shapes: its networks.
        card_gb: memory of the card in 10^9 bytes.
        tries: number of changes to plan at most; 0 plans every one that may help.
        plans: plans of the same job by what is changed, kept from one card to the next.
        **given: further arguments of `plan_memory`.
    """
    known = {} if plans is None else plans
    limit = card_gb * 1e9
    streamed = MARGIN * 2 * shapes.encoder_parameters > limit
    accepted: list[Changes] = []

    def planned(changes: list[Changes]) -> MemoryPlan:
        key = f"{streamed} {sorted(_joined(changes).items())}"
        if key not in known:
            tried = with_changes(config, _joined(changes))
            known[key] = plan_memory(tried, shapes, streamed=streamed, **given)
        return known[key]

    plan = planned([])
    left = tries or -1
    moves = torch.device(given.get("device", "cuda")).type != "cpu"
    for change in _candidates(config, shapes, moves):
        if needed(plan) <= limit or left == 0:
            break
        if not _may_help(change, plan.peak):
            continue
        if tries and MARGIN * _scaled(config, accepted, change, plan.peak) > limit:
            continue
        left -= 1
        # A stronger change replaces a weaker one of the same settings.
        others = [c for c in accepted if c.keys() != change.keys()]
        better = planned([*others, change])
        if needed(better) <= limit or _useful(plan, better):
            plan, accepted = better, [*others, change]
    if needed(plan) <= limit:
        for change in accepted[-2::-1]:  # the last one made it fit
            if left == 0:
                break
            left -= 1
            others = [c for c in accepted if c is not change]
            without = planned(others)
            if needed(without) <= limit:
                plan, accepted = without, others
    return Fit(card_gb, plan, _joined(accepted), needed(plan) <= limit, streamed)


def _joined(changes: list[Changes]) -> Changes:
    return {name: value for change in changes for name, value in change.items()}


def _useful(plan: MemoryPlan, better: MemoryPlan) -> bool:
    """Whether the phase that needed most needs clearly less, and no other one needs as much."""
    peak = plan.peak
    same = max(phase.device for phase in better.phases if phase.name == peak.name)
    return same <= (1 - USEFUL) * peak.device and better.peak.device <= peak.device


#: Phases that a change can make smaller; those not named it makes smaller through their weights.
_HELPS = {
    "model.gradient_checkpointing": ("rollout", "update"),
    "rollout.micro_batch": ("rollout", "score", "update", "evaluate"),
    "rollout.guidance_batched": ("rollout", "update", "evaluate"),
    "model.vae_tile": ("score", "evaluate"),
    "rollout.frames": ("encode", "rollout", "score", "update", "evaluate"),
    "rollout.width": ("encode", "rollout", "score", "update", "evaluate"),
}


def _may_help(change: Changes, peak: Phase) -> bool:
    """Whether a change is worth a plan: it is about what the largest phase holds."""
    phases = _HELPS.get(next(iter(change)))
    if phases is None:
        return peak.weights + peak.kept >= USEFUL * peak.device
    return peak.name in phases or peak.kept >= USEFUL * peak.device


def _scaled(config: Config, accepted: list[Changes], change: Changes, peak: Phase) -> float:
    """Peak after a change of the video's size, as if all but the weights followed its pixels.

    Changes of anything else may do more than that, and count as if they left nothing.
    """
    if not {"rollout.frames", "rollout.width"} & change.keys():
        return 0.0
    old = with_changes(config, _joined(accepted)).rollout
    new = with_changes(config, _joined([*accepted, change])).rollout
    share = new.frames * new.width * new.height / (old.frames * old.width * old.height)
    return peak.weights + share * (peak.kept + peak.working)


def _candidates(config: Config, shapes: ModelShapes, moves: bool) -> Iterator[Changes]:
    """Changes in order of harm, each only when it is one.

    With `moves` the device has memory of its own, which weights can leave.
    """
    model, r, blocks = config.model, config.rollout, shapes.spec.num_layers
    if not model.gradient_checkpointing or model.blocks_to_keep:
        yield {"model.gradient_checkpointing": True, "model.blocks_to_keep": 0}
    if r.micro_batch > 1 or r.decode_batch > 1:
        yield {"rollout.micro_batch": 1, "rollout.decode_batch": 1}
    if moves and not model.offload and not model.shard:
        yield {"model.offload": True}
    if r.guidance_batched != "sequential":
        yield {"rollout.guidance_batched": "sequential"}
    if model.storage != "fp8" and not model.shard:
        yield {"model.storage": "fp8"}
    if moves and not model.shard:
        for swap in (blocks // 2, blocks):
            if swap > model.blocks_to_swap:
                yield {"model.blocks_to_swap": swap}
    if not model.vae_tile and min(r.width, r.height) > 256:
        yield {"model.vae_tile": 256}
    for frames in (49, 33, 17):
        if frames < r.frames:
            yield {"rollout.frames": frames}
    step = 2 * shapes.spatial
    for share in (0.75, 0.5):
        yield {
            "rollout.width": max(round(r.width * share / step), 1) * step,
            "rollout.height": max(round(r.height * share / step), 1) * step,
        }


def with_changes(config: Config, changes: Changes) -> Config:
    """A configuration with other values at `table.key`."""
    for name, value in changes.items():
        table, key = name.split(".")
        config = replace(config, **{table: replace(getattr(config, table), **{key: value})})
    return config


def words(changes: Changes) -> str:
    """Changes as they stand in a TOML file."""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in changes.items())


def gigabytes(size: float) -> str:
    """Bytes as `12.3 GB`, with two places below 1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e9:.2f} GB"


def check_memory(
    config: Config,
    device: torch.device,
    limit: int | None = None,
    processes: int = 1,
    warn: Callable[[str], None] | None = None,
) -> None:
    """Refuse a run that the device's memory clearly cannot hold, before a network is loaded.

    Args:
        config: the configuration.
        device: where it will run.
        limit: bytes that it may take; None is what is free now.
        processes: number of processes; they share the weights with `model.shard`.
        warn: told when it is close.

    Raises:
        FlashGRPOError: with the need, the limit and the fix.
    """
    full = with_embedded_files(config)
    shapes = model_shapes(full)
    limit = free_bytes(device) if limit is None else limit
    if limit is None or _surely_fits(full, shapes, limit):
        return
    streamed = device.type == "cuda" and MARGIN * 2 * shapes.encoder_parameters > limit
    plan = plan_memory(full, shapes, device, processes=processes, streamed=streamed)
    peak = plan.peak
    if REFUSE * peak.device <= limit:
        if peak.device > limit and warn is not None:
            warn(
                f"the {peak.name} phase needs about {gigabytes(peak.device)}, {gigabytes(limit)} are "
                "free: it may run out of memory"
            )
        return
    found = fit(full, shapes, limit / 1e9, TRIES, device=device, processes=processes)
    fix = f"set {words(found.changes)}"
    if not found.fits:
        fix = "lower rollout.width, height or frames, or use a smaller model or a larger card"
    kind = "main memory" if device.type == "cpu" else f"memory of {device}"
    raise FlashGRPOError(
        f"the {peak.name} phase needs about {gigabytes(peak.device)}, {gigabytes(limit)} of {kind} "
        f"are free: {fix} (`flashgrpo plan` shows every phase)"
    )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None when it cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        return _available()
    return None


def _available() -> int | None:
    """Main memory that is free or can be freed; None where the system is not Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def total_bytes(device: torch.device) -> int | None:
    """All memory of a device, for hosts that can free what is taken; None when it cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return free_bytes(device)


def _surely_fits(config: Config, shapes: ModelShapes, limit: int) -> bool:
    """A bound that takes no tracing: everything in fp32, activations of every layer kept."""
    r, spec = config.rollout, shapes.spec
    tokens = (r.frames + 3) // 4 * (r.height // 16 + 1) * (r.width // 16 + 1)
    kept = 4 * tokens * (24 * spec.dim + 4 * spec.ffn_dim) * spec.num_layers
    batch = 2 * max(r.micro_batch, config.eval.seeds if r.micro_batch > 1 else 1)
    pixels = 200 * 4 * r.width * r.height * min(r.frames, 8) * r.decode_batch
    networks = 4 * (2 * spec.parameters + shapes.vae.parameters + shapes.encoder_parameters)
    return networks + batch * kept + pixels < min(limit // 2, SMALL_BYTES)
