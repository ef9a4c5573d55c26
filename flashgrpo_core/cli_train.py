"""`flashgrpo demo` and `flashgrpo train`."""

from __future__ import annotations

import dataclasses
import shutil
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .build import build_schedule, plan, preflight, with_embedded_files
from .cli_common import Answer, facts, load_job, size_words
from .config import Config
from .config_io import build_config, identity_differences
from .embedded import demo_tables
from .errors import FlashGRPOError
from .progress import Session, TerminalControl, result_words
from .runs.checkpoint import list_checkpoints
from .runs.folder import RunFolder, free_name
from .runs.report import write_report
from .schedule import Schedule
from .windows import sde_windows

if TYPE_CHECKING:
    from .distributed import World


def demo(args: Namespace) -> Answer:
    """Train the embedded tiny model with the built-in settings."""
    tables = demo_tables(args.iterations, args.seed)
    tables["run"]["output"] = str(Path(args.out).absolute())
    config = build_config(tables)
    folder = RunFolder(config.run.output, config.run.name)
    if folder.exists() and identity_differences(folder.config(), config):
        # Another seed is another run; the demo must never ask for a name.
        config.run.name = free_name(config.run.output, config.run.name)
    return _train(config, "auto")


def train(args: Namespace) -> Answer:
    """Train a configuration, or say what training it would take."""
    config = load_job(args.config, args.set, args.models)
    config.run.output = str(Path(config.run.output).absolute())
    if args.dry_run:
        return dry_run(config)
    return _train(config, args.resume)


def _train(config: Config, resume: str) -> Answer:
    from .distributed import World
    from .training import train as run_training

    try:
        from .launch import launched_world, part
    except ImportError:  # a node pack from the registry comes without it and trains in one process
        world = World()
    else:
        world = launched_world(config)
    control = TerminalControl(
        config.run.iterations, offload=config.model.offload, quiet=not world.is_main
    )
    run = RunFolder(config.run.output, config.run.name)
    with Session(control):
        control.title = f"run {run.path} ({size_of_world(world)})"
        result = run_training(config, control, world=world, resume=resume)
        if world.is_main and result.report is None and run.exists():
            result.report = write_report(run)
    if world.size > 1:
        part()
    if not world.is_main:
        return Answer("", {})
    data: dict[str, Any] = {
        "status": result.status,
        "run": result.folder,
        "iteration": result.iteration,
        "best_iteration": result.best_iteration,
        "loras": result.loras,
        "samples": run.samples,
        "report": result.report,
        "test": result.test,
    }
    if result.status == "stopped":
        # The run folder holds the complete configuration, overrides included.
        place = f'"{result.folder}"' if " " in str(result.folder) else str(result.folder)
        text = (
            f"stopped after iteration {result.iteration}; everything up to there is saved in\n"
            f"  {result.folder}\nresume with: flashgrpo train {place}"
        )
        return Answer(text, data)
    rows: list[tuple[str, Any]] = [("LoRA", path) for path in result.loras]
    rows += [("videos", run.samples), ("report", result.report)]
    if result.test:
        rows.append(("result", f"held-out test {result_words(result.test)}"))
    else:
        rows.append(("result", f"{result.iteration} iterations done; there were no test prompts"))
    return Answer(facts(rows), data)


def size_of_world(world: World) -> str:
    """How many processes train together, and where."""
    if world.size == 1:
        return "1 process"
    return f"{world.size} processes, {world.local_size} per machine, on {world.device.type}"


def dry_run(config: Config) -> Answer:
    """Check a run without loading a network: its files, counts, cost and disk space."""
    from .files import open_tensors
    from .wan.describe import describe

    full = with_embedded_files(config)
    run = RunFolder(config.run.output, config.run.name)
    preflight(config)
    _require(full)
    files: dict[str, Any] = {}
    for setting in ("transformer", "transformer_low", "vae", "text_encoder"):
        path = getattr(full.model, setting)
        if setting == "transformer_low" and not path:
            continue
        found = describe(path)
        if found["kind"] != setting.removesuffix("_low"):
            raise FlashGRPOError(
                f"model.{setting} = {path!r} is {found['title']}: name a Wan "
                f"{setting.replace('_', ' ')}"
            )
        files[setting] = {key: found[key] for key in ("path", "title", "dtype", "quantisation")}
    lora = lora_size(full, open_tensors(Path(files["transformer"]["path"])))
    counts = plan(full, lora["parameters"] * len(sde_windows(full)))
    free = free_space(run.path)
    enough = counts.disk_bytes <= free
    lack = "" if enough else ": not enough, choose another run.output or lower run.keep"
    schedule, windows = build_schedule(full), sde_windows(full)
    window = (min(w[0] for w in windows.values()), max(w[1] for w in windows.values()))
    done = max(list_checkpoints(run.checkpoints), default=0)
    data = {
        "run": run.path,
        "status": run.status(),
        "iterations": config.run.iterations,
        "iterations_done": done,
        "files": files,
        "lora": lora,
        "plan": dataclasses.asdict(counts),
        "free_bytes": free,
        "shift": schedule.shift,
        "window": list(window),
        **({"windows": windows} if full.model.transformer_low else {}),
        "sigmas": schedule.sigmas,
    }
    r = config.rollout
    prompts = counts.prompts
    steps = [f"{_named(name)}{_steps(schedule, *w)}" for name, w in windows.items()]
    rows = [("run", f"{run.path} ({run.status()}{f', {done} iterations done' if done else ''})")]
    rows += [
        (kind, f"{entry['path']} ({entry['title']}, {entry['dtype']})")
        for kind, entry in files.items()
    ]
    rows += [
        (
            "LoRA",
            f"{lora['modules']} modules, {lora['parameters']:,} parameters, rank {config.model.lora_rank}"
            + (f", for each of {', '.join(windows)}" if full.model.transformer_low else ""),
        ),
        (
            "videos",
            f"{r.frames} frames of {r.width}x{r.height}, latents {list(counts.latent_shape)}",
        ),
        (
            "prompts",
            f"{prompts['train']} training, {prompts['validation']} validation, {prompts['test']} test",
        ),
        (
            "SDE steps",
            f"{'; '.join(steps)}, shift {schedule.shift:g}",
        ),
        (
            "iteration",
            f"{counts.videos_per_iteration} videos, {counts.forwards_per_iteration:,.0f} forwards, {counts.train_forwards_per_iteration:,.0f} forwards and backwards",
        ),
        (
            "evaluation",
            f"{counts.evaluations} times and the final test, {counts.evaluation_forwards:,} forwards",
        ),
        (
            "total",
            f"{config.run.iterations} iterations, {counts.total_forwards:,.0f} forwards (a backward counts as two)",
        ),
        ("disk", f"about {size_words(counts.disk_bytes)}, {size_words(free)} are free{lack}"),
        ("", "nothing was trained (--dry-run)"),
    ]
    return Answer(facts(rows), data, 2 if lack else 0)


def free_space(path: Path) -> int:
    """Free bytes of the file system on which `path` will be made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _named(expert: str) -> str:
    return f"{expert} " if expert else ""


def _steps(schedule: Schedule, first: int, end: int) -> str:
    noise = ", ".join(f"{sigma:.4f}" for sigma in schedule.sigmas[first:end])
    return f"{first} to {end - 1} of {schedule.steps} (sigma {noise})"


def _require(config: Config) -> None:
    for setting, example in (
        ("vae", "wan_2.1_vae.safetensors"),
        ("text_encoder", "umt5_xxl_fp8_e4m3fn_scaled.safetensors"),
    ):
        if not getattr(config.model, setting):
            raise FlashGRPOError(f"model.{setting} is empty: name the file, e.g. {example}")


def lora_size(config: Config, file: Any) -> dict[str, int]:
    """Modules and parameters of the LoRA, from the shapes in the transformer's file."""
    from torch import nn

    from .wan.detect import detect_transformer
    from .wan.lora import target_modules
    from .wan.names import to_diffusers

    prefix = detect_transformer(file).prefix
    linear: dict[str, nn.Linear] = {}
    for key in file.keys():
        name = key.removeprefix(prefix)
        if not name.endswith(".weight") or len(file.shape(key)) != 2:
            continue
        out_features, in_features = file.shape(key)
        module = (to_diffusers(name) or name).removesuffix(".weight")
        linear[module] = nn.Linear(in_features, out_features, device="meta")

    class Shapes:
        """Just enough of a network for `target_modules`."""

        def named_modules(self) -> Any:
            return linear.items()

    chosen = target_modules(cast(nn.Module, Shapes()), config.model.lora_targets)
    rank = config.model.lora_rank
    size = sum(rank * (linear[n].in_features + linear[n].out_features) for n in chosen)
    return {"modules": len(chosen), "parameters": size}
