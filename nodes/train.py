"""Train: the whole loop in one node, and its rarely used settings."""

from __future__ import annotations

from comfy_api.latest import io

from . import host
from .values import AdvancedType, PolicyType, PromptsType, RewardType, RunType, VideoSettingsType
from .widgets import CATEGORY, advanced, seed, setting


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
                setting("rollout", "group_size", auto=-1),
                setting("rollout", "prompts_per_iteration", auto=-1),
                setting("optim", "learning_rate", auto=-1, step=1e-6),
                setting("optim", "warmup", auto=-1),
                setting("loss", "kl", auto=-1, step=0.001),
                setting("loss", "clip", auto=-1, step=1e-4),
                setting("eval", "prompts", name="validation_prompts", auto=-1),
                setting("eval", "seeds", name="validation_seeds", auto=-1),
                setting("eval", "test_prompts", auto=-1),
                setting("eval", "test_seeds", auto=-1),
                setting("eval", "patience", auto=-1),
                setting("rollout", "noise", auto=-1),
                advanced(_window("window_first", "First sampling step that may be stochastic")),
                advanced(_window("window_end", "Step behind the last that may be stochastic")),
                advanced(setting("schedule", "draw", auto=-1)),
                advanced(setting("schedule", "sde", auto=-1)),
                advanced(setting("schedule", "eta", auto=-1, step=0.05)),
                advanced(setting("schedule", "kind", name="schedule", auto=-1)),
                advanced(setting("loss", "advantage_std", auto=-1)),
                advanced(setting("loss", "advantage_clamp", auto=-1, step=0.5)),
                advanced(setting("loss", "rectification", auto=-1)),
                advanced(setting("reward", "normalise", auto=-1)),
                advanced(setting("reward", "on_nan", auto=-1)),
                advanced(setting("optim", "max_grad_norm", auto=-1, step=0.001)),
                advanced(setting("optim", "weight_decay", auto=-1, step=1e-5)),
                advanced(setting("optim", "ema_decay", auto=-1)),
                advanced(setting("optim", "updates_per_rollout", auto=-1)),
                advanced(setting("eval", "weights", auto=-1)),
                advanced(setting("run", "save_every", auto=-1)),
                advanced(setting("run", "keep", auto=-1)),
                advanced(setting("model", "gradient_checkpointing", auto=-1)),
            ],
            outputs=[AdvancedType.Output(display_name="advanced")],
        )


def _window(name: str, tip: str) -> object:
    return io.Int.Input(
        name,
        default=-1,
        min=-1,
        max=999,
        tooltip=f"{tip}, 0 to steps - 1. Both -1 = the first half of the steps.",
    )
