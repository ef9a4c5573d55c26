"""`flashgrpo sample`, `eval` and `export`: what can be done with trained weights."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .build import (
    Networks,
    build_eval_reward,
    build_prompts,
    build_schedule,
    latent_layout,
    load_networks,
    pick_device,
    pick_dtype,
    rollout_settings,
    start_images,
    text_tokens,
    with_embedded_files,
)
from .cli_common import Answer, facts, job_of, reward_terms, saved_weights, table
from .conditioning import StartImage, find_image
from .config import Config
from .control import Control
from .errors import FlashGRPOError
from .evaluation import evaluate, paired_interval
from .experts import expert_names, expert_weights
from .export import write_lora
from .files import write_text_atomic
from .lookup import find_file, resolve_files
from .networks import merge_file, model_spec
from .ode import OdeJob, sample_all_ode
from .policy import adapter_pairs
from .progress import Session, TerminalControl, result_words
from .prompts import Prompt, read_prompts
from .runs.charts import number
from .runs.events import read_events
from .runs.folder import RunFolder
from .seeds import derive_seed
from .video import write_mp4
from .wan.decode import decode_latents
from .wan.lora import read_lora
from .wan.lora_origin import expert_of
from .wan.text import cached_embeddings


def sample(args: Namespace) -> Answer:
    """Make a video of each prompt with the plain sampler."""
    config = with_embedded_files(job_of(args))
    prompts = _prompts(args)
    models = Path(args.models) if args.models else None
    for path in args.lora:
        file = find_file(path, "lora", "--lora", Path.cwd(), models)
        entry: dict[str, Any] = {"file": file, "strength": args.strength}
        if config.model.transformer_low:
            # A pair of files is told apart by header or name; one that says nothing goes on both.
            entry |= {"expert": expert_of(file)} if expert_of(file) else {}
        config.model.frozen_loras.append(entry)
    out = Path(args.out)
    rows: list[dict[str, Any]] = []
    with Session(TerminalControl(offload=config.model.offload)) as control:
        networks, context, negative, images = _loaded(config, prompts, control)
        settings = rollout_settings(config, *latent_layout(networks))
        schedule = build_schedule(config)
        control.phase("sample", len(prompts) * args.count)
        with networks.policy.reference():  # the policy's own LoRA is empty
            for i, prompt in enumerate(prompts):
                for s in range(args.count):
                    # The same words and seed give the same noise, with or without a LoRA.
                    noise = derive_seed(args.seed + s, prompt.text, "sample")
                    job = OdeJob([noise], context[prompt.text], find_image(images, prompt.image))
                    latents = sample_all_ode(
                        networks.policy, [job], schedule, settings, negative, control
                    )[0]
                    control.check()
                    control.bring(networks.vae)
                    video = decode_latents(networks.vae, latents)[0]
                    path = out / f"{i:03d}_{args.seed + s}.mp4"
                    write_mp4(path, video, config.rollout.fps)
                    rows.append({"file": str(path), "prompt": prompt.text, "seed": args.seed + s})
    write_text_atomic(out / "index.json", json.dumps(rows, ensure_ascii=False, indent=1) + "\n")
    return Answer("\n".join(row["file"] for row in rows), {"videos": rows})


def _prompts(args: Namespace) -> list[Prompt]:
    if not all(text.strip() for text in args.prompt):
        raise FlashGRPOError('--prompt "" is empty: say what the video shows')
    prompts = [Prompt(text) for text in args.prompt]
    if args.prompts:
        prompts += read_prompts(args.prompts)
    if args.image:
        prompts = [Prompt(p.text, p.image or args.image) for p in prompts]
    if not prompts:
        raise FlashGRPOError('no prompt is given: use --prompt "..." or --prompts FILE')
    return prompts


def _loaded(
    config: Config, prompts: list[Prompt], control: Control
) -> tuple[
    Networks, dict[str, torch.Tensor], torch.Tensor | None, Callable[[str], StartImage] | None
]:
    """Embeddings first, so that the text encoder has left memory when the networks come."""
    if not config.model.text_encoder:
        raise FlashGRPOError("model.text_encoder is empty: name the UMT5 .safetensors file")
    device = pick_device(config.model.device)
    cache = Path(config.run.output) / "flashgrpo" / "cache"
    context = cached_embeddings(
        [*(p.text for p in prompts), config.prompts.negative],
        config.model.text_encoder,
        text_tokens(config),
        cache,
        torch.float32 if device.type == "cpu" else torch.bfloat16,
        device,
        control,
    )
    networks = load_networks(config, device)
    guided = rollout_settings(config).guided
    images = start_images(config, networks, prompts, cache, control)
    return networks, context, context[config.prompts.negative] if guided else None, images


def evaluate_command(args: Namespace) -> Answer:
    """Judge a run or a LoRA file against its starting policy, on the same noise."""
    target = Path(args.target)
    saved = None
    if target.is_dir():
        run = RunFolder.at(target)
        config = run.config()
        config.run.output, config.run.name = str(run.output), run.name
        config = resolve_files(config, run.path, args.models)
        saved = saved_weights(run, args.checkpoint, args.weights)
    else:
        config = job_of(args)
    config = with_embedded_files(config)
    if args.reward:
        config.eval.terms = reward_terms(args.reward)
    held, seeds = _held(config, args)
    with Session(TerminalControl(offload=config.model.offload)) as control:
        if not saved:
            read_lora(target)  # before minutes of loading
        networks, context, negative, images = _loaded(config, held, control)
        policy = networks.policy
        settings = rollout_settings(config, *latent_layout(networks))

        def judge(name: str) -> Any:
            def keep(p: int, s: int, video: np.ndarray, reward: float) -> None:
                write_mp4(Path(args.out) / name / f"{p:03d}_{s}.mp4", video, config.rollout.fps)

            control.phase(name, 2 * len(held) * seeds)
            return evaluate(
                policy,
                networks.vae,
                held,
                seeds,
                build_eval_reward(config),
                build_schedule(config),
                settings,
                context.__getitem__,
                negative,
                run_seed=config.run.seed,
                split=args.split,
                fps=config.rollout.fps,
                decode_batch=config.rollout.decode_batch,
                control=control,
                keep=keep if args.out else None,
                images=images,
            )

        with policy.reference():
            before = judge("start")
        if saved:
            with policy.using(saved.tensors):
                after = judge("trained")
        else:
            merge_file(networks, target, args.strength)
            with policy.reference():
                after = judge("trained")
    result = _compared(after.total, before.total, config.run.seed)
    terms = {
        name: _compared(values, before.terms[name], config.run.seed)
        for name, values in after.terms.items()
    }
    data: dict[str, Any] = {
        "target": str(target),
        "split": args.split,
        "iteration": saved.iteration if saved else None,
        "weights": saved.weights if saved else None,
        "prompts": len(held),
        "seeds": seeds,
        **result,
        "terms": terms,
    }
    what = f"{saved.weights} weights of iteration {saved.iteration}" if saved else target.name
    rows = [["", "start", "trained", "difference", "95 % interval"]]
    for name, entry in [("total", result), *terms.items()]:
        low, high = number(entry["ci_low"], True), number(entry["ci_high"], True)
        rows.append(
            [
                name,
                number(entry["baseline_mean"]),
                number(entry["reward_mean"]),
                number(entry["difference"], True),
                f"{low} to {high}",
            ]
        )
    head = f"{what}, {len(held)} {args.split} prompts, {seeds} seed(s) each"
    return Answer(f"{head}\n{table(rows)}\n{result_words(result)}", data)


def _compared(after: np.ndarray, before: np.ndarray, seed: int) -> dict[str, float]:
    difference, low, high = paired_interval(after, before, seed=seed)
    return {
        "reward_mean": float(np.nanmean(np.nanmean(after, axis=1))),
        "baseline_mean": float(np.nanmean(np.nanmean(before, axis=1))),
        "difference": difference,
        "ci_low": low,
        "ci_high": high,
    }


def _held(config: Config, args: Namespace) -> tuple[list[Prompt], int]:
    """Prompts and seeds per prompt."""
    test = args.split == "test"
    if args.prompts:
        held = read_prompts(args.prompts)
    else:
        split = build_prompts(config)
        held = split.test if test else split.validation
        held = held[: config.eval.test_prompts if test else config.eval.prompts]
    held = held[: args.limit] if args.limit else held
    if not held:
        raise FlashGRPOError(f"there are no {args.split} prompts: give --prompts FILE")
    return held, args.seeds or (config.eval.test_seeds if test else config.eval.seeds)


class SavedPolicy:
    """What writing a LoRA needs to know of a policy, without its network."""

    def __init__(self, rank: int, alpha: float, dtype: torch.dtype) -> None:
        self.rank, self.alpha, self.dtype = rank, float(alpha), dtype


def export(args: Namespace) -> Answer:
    """Write a LoRA file from a checkpoint, one for each expert, and read it back."""
    run = RunFolder.at(args.run_folder)
    config = resolve_files(run.config(), run.path, args.models)
    config = replace(config, run=replace(config.run, name=run.name))
    saved = saved_weights(run, args.checkpoint, args.weights)
    fmt = args.format or config.run.lora_format
    if args.out and Path(args.out).suffix != ".safetensors":
        raise FlashGRPOError(f"--out {args.out!r} must end in .safetensors")
    spec = model_spec(config)
    started = [e for e in read_events(run.events) if e.get("event") == "run_started"]
    device = torch.device(str(started[-1].get("device", "cpu")) if started else "cpu")
    policy = SavedPolicy(
        config.model.lora_rank,
        config.model.lora_alpha,
        pick_dtype(config.model.dtype, spec.weight_dtype, device),
    )
    files = []
    for expert in expert_names(saved.tensors):
        own = expert_weights(saved.tensors, expert)
        mark = f"_{expert}" if expert else ""
        out = run.lora / f"{run.name}{mark}_{saved.iteration:06d}_{fmt}.safetensors"
        if args.out:
            out = Path(args.out)
            out = out.with_name(f"{out.stem}{mark}{out.suffix}")
        digest = write_lora(out, policy, own, config, saved.iteration, spec, fmt, expert)
        _verify(out, adapter_pairs(own), policy.alpha / policy.rank)
        files.append(
            {"file": str(out), "sha256": digest, "expert": expert, "modules": len(own) // 2}
        )
    data = {
        "file": files[0]["file"],
        "sha256": files[0]["sha256"],
        "format": fmt,
        "iteration": saved.iteration,
        "weights": saved.weights,
        "modules": sum(int(str(entry["modules"])) for entry in files),
        **({"files": files} if len(files) > 1 else {}),
    }
    rows: list[tuple[str, Any]] = [("LoRA", entry["file"]) for entry in files]
    rows += [(k, data[k]) for k in ("format", "iteration", "weights", "modules")]
    return Answer(facts(rows), data)


def _verify(path: Path, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
    """The file, read as other programs read it, must hold the change that was trained."""
    loaded = read_lora(path)
    for name, (a, b) in pairs.items():
        expected = scale * (b.float() @ a.float())
        delta = loaded[name].delta() if name in loaded else None
        limit = 1e-3 * float(expected.abs().max()) + 1e-12
        if delta is None or not float((delta - expected).abs().max()) <= limit:
            path.unlink(missing_ok=True)
            raise FlashGRPOError(
                f"exported LoRA {path.name} does not hold the trained change of {name}: not kept; "
                "export with another --format"
            )
