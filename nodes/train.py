"""Train: the whole loop in one node, and its rarely used settings."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..flashgrpo_core import embedded
from ..flashgrpo_core.experts import HIGH, LOW
from ..flashgrpo_core.runs.events import read_events
from . import host, pictures, pool
from .pictures import to_image
from .settings import merge, run_config, run_folder, window
from .training import expert_loras, train_run
from .values import (
    Advanced,
    AdvancedType,
    Policy,
    PolicyType,
    Prompts,
    PromptsType,
    Reward,
    RewardType,
    Run,
    RunType,
    Tables,
    VideoSettings,
    VideoSettingsType,
)
from .widgets import CATEGORY, advanced, chosen, seed, setting
from .workers import HERE, WORKERS

#: Widget -> table and key of the configuration, step of the arrows, whether it is folded away.
ADVANCED: dict[str, tuple[str, str, float | None, bool]] = {
    "group_size": ("rollout", "group_size", None, False),
    "prompts_per_iteration": ("rollout", "prompts_per_iteration", None, False),
    "learning_rate": ("optim", "learning_rate", 1e-6, False),
    "warmup": ("optim", "warmup", None, False),
    "kl": ("loss", "kl", 0.001, False),
    "clip": ("loss", "clip", 1e-4, False),
    "validation_prompts": ("eval", "prompts", None, False),
    "validation_seeds": ("eval", "seeds", None, False),
    "test_prompts": ("eval", "test_prompts", None, False),
    "test_seeds": ("eval", "test_seeds", None, False),
    "patience": ("eval", "patience", None, False),
    "noise": ("rollout", "noise", None, False),
    "draw": ("schedule", "draw", None, True),
    "sde": ("schedule", "sde", None, True),
    "eta": ("schedule", "eta", 0.05, True),
    "schedule": ("schedule", "kind", None, True),
    "advantage_std": ("loss", "advantage_std", None, True),
    "advantage_clamp": ("loss", "advantage_clamp", 0.5, True),
    "rectification": ("loss", "rectification", None, True),
    "normalise": ("reward", "normalise", None, True),
    "on_nan": ("reward", "on_nan", None, True),
    "max_grad_norm": ("optim", "max_grad_norm", 0.001, True),
    "weight_decay": ("optim", "weight_decay", 1e-5, True),
    "ema_decay": ("optim", "ema_decay", None, True),
    "updates_per_rollout": ("optim", "updates_per_rollout", None, True),
    "weights": ("eval", "weights", None, True),
    "save_every": ("run", "save_every", None, True),
    "keep": ("run", "keep", None, True),
    "gradient_checkpointing": ("model", "gradient_checkpointing", None, True),
}
#: The same, of later versions: they stand behind the others and are optional, so that graphs that
#: were saved before stay valid.
ADDED: dict[str, tuple[str, str, float | None, bool]] = {
    "suffix_share": ("rollout", "suffix_share", 0.05, True),
    "cache_threshold": ("rollout", "cache_threshold", 0.01, True),
    "guidance_batched": ("rollout", "guidance_batched", None, True),
    "kl_on_drop": ("loss", "kl_on_drop", 0.001, True),
    "blocks_to_keep": ("model", "blocks_to_keep", None, True),
    "vae_tile": ("model", "vae_tile", 64, True),
    "optimizer": ("optim", "kind", None, True),
}


class Train(host.ComfyNode):
    """Trains a run to its end."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOTrain",
            display_name="Train",
            category=CATEGORY,
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            description="Trains the LoRA: group, rollout, score, advantage, step, again and again. "
            "A finished run returns its result at once; a stopped one goes on. Every evaluation "
            "writes a LoRA that LoraLoader lists.",
            inputs=[
                PolicyType.Input("policy", tooltip="What is trained, and the name of the run."),
                PromptsType.Input("prompts", tooltip="Prompts to train on and held-out ones."),
                VideoSettingsType.Input("video_settings", tooltip="Size and sampling."),
                RewardType.Input(
                    "reward",
                    optional=True,
                    tooltip="What is rewarded; without it technical quality and motion (tiny Wan: "
                    "the tiny world).",
                ),
                setting("run", "preset", note="paper = the published settings, slower to learn."),
                setting("run", "iterations", note="Raise it later to go on with a finished run."),
                seed("Seed of every random draw of the run, 0 to 2^53 - 1."),
                setting("eval", "every", name="evaluate_every"),
                AdvancedType.Input(
                    "advanced", optional=True, tooltip="Settings that replace the preset's."
                ),
                io.Combo.Input(
                    "run_on",
                    options=[HERE, WORKERS],
                    default=HERE,
                    optional=True,
                    tooltip="Where the training runs: in this ComfyUI, or in a worker that you have "
                    "started with `flashgrpo worker`, on this or another machine. The node shows the "
                    "same either way, and says the command when no worker is running.",
                ),
                RewardType.Input(
                    "evaluation_reward",
                    optional=True,
                    tooltip="Another reward for judging the held-out prompts; without it the reward "
                    "that is trained on.",
                ),
            ],
            outputs=[
                io.LoraModel.Output(
                    display_name="lora", tooltip="The trained LoRA (high-noise or only expert)."
                ),
                io.LoraModel.Output(
                    display_name="lora_low_noise",
                    tooltip="LoRA of the low-noise expert; blocked when there is none.",
                ),
                RunType.Output(display_name="run"),
                io.Image.Output(display_name="curve"),
            ],
        )

    @classmethod
    def execute(
        cls,
        policy: Policy,
        prompts: Prompts,
        video_settings: VideoSettings,
        preset: str,
        iterations: int,
        seed: int,
        evaluate_every: int,
        reward: Reward | None = None,
        advanced: Advanced | None = None,
        run_on: str = HERE,
        evaluation_reward: Reward | None = None,
    ) -> io.NodeOutput:
        """Train, resume, or return what is there."""
        tables = merge(
            video_settings.tables,
            {"reward": {"terms": _terms(reward)}},
            {"eval": {"every": evaluate_every, "terms": _terms(evaluation_reward)}},
            _resolved(advanced, video_settings),
            {"run": {"name": policy.run, "preset": preset, "iterations": iterations, "seed": seed}},
        )
        config = run_config(policy.files, prompts, tables)
        if policy.files.tiny:
            # The stock loaders need the files to try the LoRA; nobody has them from elsewhere.
            host.publish_model("diffusion_models", embedded.TINY_TRANSFORMER)
            host.publish_model("vae", embedded.TINY_VAE)
        try:
            result, lora = train_run(policy, prompts, config, run_on)
        finally:
            pool.clear()
        loras = expert_loras(config, result)
        events = read_events(run_folder(policy.run).events)
        picture = to_image(pictures.curve(events, f"{policy.run}: {lora}"))
        return io.NodeOutput(
            loras.get(HIGH) or loras.get("") or host.blocked(),
            loras.get(LOW) or host.blocked(),
            Run(policy.run, result.iteration),
            picture,
            # Not shown on the node: the monitor draws the curve, and frontend 1.58.1 would show the
            # last live preview a second time in its place.
        )


def _terms(reward: Reward | None) -> list[dict[str, Any]]:
    """Tables of a linked reward; none without a link."""
    return [dict(term) for term in reward.terms] if reward else []


def _resolved(advanced: Advanced | None, video_settings: VideoSettings) -> Tables:
    """The advanced settings, with the window in terms of the steps."""
    if advanced is None:
        return {}
    tables = merge(advanced.tables)
    first, end = tables["schedule"].pop("window")
    steps = video_settings.tables["schedule"]["steps"]
    return merge(tables, {"schedule": {"window": window(first, end, steps)}})


class TrainAdvanced(host.ComfyNode):
    """Settings of Train that replace those of the preset."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOTrainAdvanced",
            display_name="Advanced Training Settings",
            category=CATEGORY,
            description="Replaces settings of the preset; -1 and 'preset' leave them as they are.",
            inputs=[
                *(_widget(name) for name in ADVANCED if not ADVANCED[name][3]),
                advanced(_window("window_first", "First sampling step that may be stochastic")),
                advanced(_window("window_end", "Step behind the last that may be stochastic")),
                *(advanced(_widget(name)) for name in ADVANCED if ADVANCED[name][3]),
                *(advanced(_widget(name)) for name in ADDED),
            ],
            outputs=[AdvancedType.Output(display_name="advanced")],
        )

    @classmethod
    def execute(cls, window_first: int, window_end: int, **values: Any) -> io.NodeOutput:
        """Keep what was set."""
        tables: Tables = {"schedule": {"window": [window_first, window_end]}}
        for name, value in values.items():
            table, key, _, _ = (ADVANCED | ADDED)[name]
            tables.setdefault(table, {}).update(chosen(table, key, value))
        return io.NodeOutput(Advanced(tables))


def _widget(name: str) -> Any:
    table, key, step, _ = (ADVANCED | ADDED)[name]
    return setting(table, key, name=name, auto=-1, step=step, optional=name in ADDED)


def _window(name: str, tip: str) -> object:
    return io.Int.Input(
        name,
        default=-1,
        min=-1,
        max=999,
        tooltip=f"{tip}, 0 to steps - 1. Both -1 = the first half of the steps.",
    )
