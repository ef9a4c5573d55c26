"""How this program was started: alone, or as one of several by `accelerate`, `torchrun` or SLURM.

Command line only: launchers speak through environment variables, which no node may read.
"""

from __future__ import annotations

import os

from .config import Config
from .distributed import World
from .errors import FlashGRPOError


def launched_world(config: Config) -> World:
    """Join the processes that this one was started with.

    A launcher's choice of FSDP (`accelerate config`) switches `model.shard` on.

    Args:
        config: the configuration; `model.shard` may be changed.

    Raises:
        FlashGRPOError: fewer processes run than `run.processes` or `WORLD_SIZE` ask for.
    """
    announced = os.environ.get("WORLD_SIZE", "")
    expected = int(announced) if announced.isdecimal() else 1
    if expected > 1 and "LOCAL_RANK" not in os.environ:
        raise FlashGRPOError(
            f"WORLD_SIZE = {expected} is set, but this process was not started by a launcher and "
            f"would train alone: use torchrun or accelerate launch, or unset WORLD_SIZE"
        )
    wanted = config.run.processes
    if wanted and wanted != expected:
        raise FlashGRPOError(
            f"run.processes = {wanted}, but {expected} process(es) were started: start {wanted}, e.g. with "
            f"torchrun --nproc_per_node {wanted} -m flashgrpo_core train ..., or set run.processes = 0"
        )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        raise FlashGRPOError(
            "DeepSpeed is not used here: only a LoRA is trained, so ZeRO has no optimizer state worth "
            "sharding; choose multi-GPU in accelerate config, or FSDP for models that do not fit one GPU"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        config.model.shard = True
    world = World.launched(cpu=config.model.device == "cpu", timeout=config.run.timeout)
    if world.size < expected:
        raise FlashGRPOError(
            f"WORLD_SIZE = {expected}, but only {world.size} process(es) train together: the launcher "
            "and this program use different installations of torch or accelerate"
        )
    return world


def part() -> None:
    """Leave the other processes at the end of the program."""
    from accelerate import PartialState

    PartialState().destroy_process_group()
