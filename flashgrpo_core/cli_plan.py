"""`flashgrpo plan`: memory and time of a run per phase, and which card holds it."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from .build import build_prompts, needed_prompts, plan
from .cli_common import Answer, load_job, table
from .config import Config
from .config_io import apply_override, build_config
from .devices import pick_device
from .embedded import TINY_PROMPTS, with_embedded_files
from .errors import FlashGRPOError
from .memory import MemoryPlan, plan_memory, sharding_plan
from .memory_fit import CARDS, fit, free_bytes
from .memory_rate import measured_rate
from .memory_text import card_table, gb, phase_table
from .model_shapes import ModelShapes, empty_policy, model_shapes, published_shapes
from .networks import pick_dtype, resting_storage
from .presets import PRESETS, find_preset, preset_tables
from .wan.detect import WanSpec


def plan_command(args: Namespace) -> Answer:
    """Say what a run takes, or list the presets."""
    if args.presets:
        return _presets()
    if bool(args.config) == bool(args.preset):
        raise FlashGRPOError(
            "name a CONFIG (TOML file or run folder) or a --preset, one of the two; --presets lists them"
        )
    device = pick_device("auto") if args.device == "auto" else torch.device(args.device)
    if args.preset:
        config, shapes = preset_job(args.preset, args.set, args.processes or 1)
    else:
        config, shapes = load_job(args.config, args.set, args.models), None
    return answer(config, device, args.rate, args.processes or config.run.processes or 1, shapes)


def preset_job(
    name: str, overrides: Sequence[str], processes: int = 1
) -> tuple[Config, ModelShapes]:
    """A preset as a job on the published model, whose files need not be there.

    With several processes the weights are sharded, in place of 8-bit storage, swapping and offload.

    Args:
        name: name of the preset.
        overrides: `table.key=value` settings over it.
        processes: number of processes.
    """
    tables, model = preset_tables(name), find_preset(name).model
    # A plan reads prompts to count evaluations only; the embedded ones stand for the user's.
    tables["prompts"] = {"file": str(TINY_PROMPTS["train"])}
    tables["model"]["transformer"] = "high_noise.safetensors"
    if "A14B" in model:
        tables["model"]["transformer_low"] = "low_noise.safetensors"
    if processes > 1:
        tables["model"] |= {"shard": True, "storage": "full", "blocks_to_swap": 0, "offload": False}
    for text in overrides:
        apply_override(tables, text)
    return build_config(tables), published_shapes(model)


def answer(
    config: Config,
    device: torch.device,
    rate: float | None = None,
    processes: int = 1,
    shapes: ModelShapes | None = None,
) -> Answer:
    """The plan as text and data.

    Args:
        config: the configuration.
        device: where the run is planned; CUDA need not be there.
        rate: TFLOP/s that the device reaches; None measures, when it is there.
        processes: number of processes.
        shapes: of the model; None reads them from its files.
    """
    full = with_embedded_files(config)
    shapes = shapes or model_shapes(full)
    prompts = needed_prompts(full, build_prompts(full))
    given: dict[str, Any] = {
        "device": device,
        "images": any(p.image for p in prompts),
        "prompts": len(prompts),
        "processes": processes,
    }
    found = plan_memory(full, shapes, **given)
    seconds, flops = _times(full, found, device, rate)
    data: dict[str, Any] = {
        "device": device.type,
        "phases": [dataclasses.asdict(p) | {"device_bytes": p.device} for p in found.phases],
        "peak": {"phase": found.peak.name, "bytes": found.peak.device},
        "host_bytes": found.host,
        "parameters": found.parameters,
        "lora_parameters": found.lora_parameters,
        "tflops_per_iteration": {name: value / 1e12 for name, value in flops.items()},
        "seconds_per_iteration": seconds,
    }
    lines = [phase_table(found, seconds, flops), ""]
    if device.type == "cpu":
        free = free_bytes(device)
        lines.append(
            f"peak {gb(found.peak.device)} of main memory beyond Python and its libraries "
            f"(about 0.8 GB), in {found.peak.name}"
            + ("" if free is None else f"; {gb(free)} are free")
        )
    else:
        plans = {"False []": found}
        cards = [fit(full, shapes, card, plans=plans, **given) for card in CARDS]
        data["cards"] = [
            {
                "card_gb": f.card_gb,
                "fits": f.fits,
                "changes": f.changes,
                "peak_bytes": f.plan.peak.device,
                "phase": f.plan.peak.name,
            }
            for f in cards
        ]
        lines += [
            f"peak {gb(found.peak.device)} on the device in {found.peak.name}, "
            f"{gb(found.host)} of main memory",
            "",
            card_table(cards),
        ]
    if full.model.shard and processes > 1:
        lines += ["", _sharding(full, shapes.spec, processes, data)]
    lines += ["", _basis(device)]
    return Answer("\n".join(lines), data)


def _times(
    config: Config, found: MemoryPlan, device: torch.device, rate: float | None
) -> tuple[dict[str, float] | None, dict[str, float]]:
    """Seconds of the phases of an iteration (None without a rate), and their operations."""
    counts = plan(config, found.lora_parameters)
    shown = counts.evaluation_forwards / max(config.schedule.steps, 1)
    flops = {
        "rollout": counts.forwards_per_iteration * found.forward_flops,
        "score": counts.videos_per_iteration * found.decode_flops,
        "update": counts.train_forwards_per_iteration
        * found.train_flops
        * config.optim.updates_per_rollout,
        "evaluate": (counts.evaluation_forwards * found.forward_flops + shown * found.decode_flops)
        / max(counts.evaluations + 1, 1),
    }
    if rate is None and (device.type == "cpu" or torch.cuda.is_available()):
        rate = measured_rate(device, config.model.dtype) / 1e12
    if rate is None:
        return None, flops
    return {name: value / rate / 1e12 for name, value in flops.items()}, flops


def _sharding(config: Config, spec: WanSpec, processes: int, data: dict[str, Any]) -> str:
    dtype = pick_dtype(config.model.dtype, spec.weight_dtype, torch.device("cuda"))
    storage = resting_storage("full", spec, torch.device("cuda"))
    full = dataclasses.replace(config, model=dataclasses.replace(config.model, storage=storage))
    policy = empty_policy(full, spec, dtype, spec.num_layers, 0)
    found = sharding_plan(policy, processes)
    data["sharding"] = dataclasses.asdict(found)
    total = sum(found.parameters)
    return (
        f"sharded over {processes} processes: {min(found.parameters):,} to "
        f"{max(found.parameters):,} of {total:,} parameters each, {gb(found.device_bytes)} per "
        "device with two gathered blocks and the LoRA"
    )


def _basis(device: torch.device) -> str:
    if device.type == "cpu":
        return (
            "Memory within 10 % of what was measured on CPUs (benchmarks/plan_accuracy.py). Time "
            "from matrix products alone: expect one to two times as much, and up to four times for tiny "
            "models."
        )
    return (
        "From shapes; a card fits with 10 % to spare. Measured on CPUs only, where it is within "
        "10 %. Time from matrix products alone: expect one to two times as much, and up to four times "
        "for tiny models."
    )


def _presets() -> Answer:
    rows = [["preset", "video", "storage", "swapped", "guidance", "shift"]]
    for name, preset in PRESETS.items():
        r, model = preset.tables["rollout"], preset.tables["model"]
        rows.append(
            [
                name,
                f"{r['frames']} x {r['width']}x{r['height']}",
                model["storage"],
                str(model["blocks_to_swap"]),
                f"{r['guidance']:g}",
                f"{preset.tables['schedule']['shift']:g}",
            ]
        )
    data = {name: dataclasses.asdict(preset) for name, preset in PRESETS.items()}
    return Answer(
        table(rows) + '\n\nUse one with `model_preset = "NAME"` under [run]; 0 is the '
        "model's own shift.",
        data,
    )
