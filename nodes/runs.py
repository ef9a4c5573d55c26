"""Nodes for results: save a LoRA, compare before and after, look at a run."""

from __future__ import annotations

from comfy_api.latest import io

from ..flashgrpo_core.wan.lora import LORA_FORMATS
from . import host
from .values import (
    FrozenLorasType,
    PolicyType,
    PromptsType,
    RewardType,
    RunType,
    VideoSettingsType,
)
from .widgets import CATEGORY, advanced, run_name, seed


class SaveLora(host.ComfyNode):
    """Writes a LoRA file that the stock loaders list."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOSaveLora",
            display_name="Save LoRA",
            category=CATEGORY,
            is_output_node=True,
            description="Writes a LoRA into output/loras, where LoraLoader lists it (press R to "
            "refresh the lists). A file of that name is never overwritten.",
            inputs=[
                io.MultiType.Input(
                    "lora",
                    types=[io.LoraModel, PolicyType],
                    tooltip="The LoRA of Train or Load Run, or a policy after a Train Step.",
                ),
                io.String.Input(
                    "name",
                    default="flashgrpo/my_lora",
                    tooltip="File name without ending, below output/loras; '/' makes a subfolder.",
                ),
                io.Combo.Input(
                    "key_format",
                    options=list(LORA_FORMATS),
                    default="comfyui",
                    tooltip="Key names: comfyui for ComfyUI, kohya for its tools (ComfyUI reads them "
                    "too), diffusers for Python scripts.",
                ),
                advanced(
                    io.Combo.Input(
                        "weights",
                        options=["live", "ema"],
                        default="live",
                        tooltip="Which weights of a policy: live (now) or ema (their moving average, "
                        "smoother after many steps). A LoRA has only one kind.",
                    )
                ),
            ],
            outputs=[
                io.String.Output(
                    display_name="lora_name", tooltip="The name as LoraLoader lists it."
                )
            ],
        )


class Compare(host.ComfyNode):
    """One video: the starting policy on the left, the trained one on the right."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOCompare",
            display_name="Compare",
            category=CATEGORY,
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            description="Samples held-out prompts from the same noise before and after training and "
            "puts them side by side in one video, with their rewards.",
            inputs=[
                io.MultiType.Input(
                    "trained",
                    types=[PolicyType, RunType],
                    tooltip="A policy, or a run (its exported LoRA is shown).",
                ),
                PromptsType.Input("prompts", tooltip="Test prompts are taken first."),
                VideoSettingsType.Input("video_settings", tooltip="Size and sampling."),
                io.Int.Input(
                    "prompt_count",
                    default=3,
                    min=1,
                    max=64,
                    tooltip="How many prompts are shown, 1 to 64.",
                ),
                io.Int.Input(
                    "seeds_per_prompt",
                    default=1,
                    min=1,
                    max=16,
                    tooltip="How many pairs of videos per prompt, 1 to 16.",
                ),
                seed("First seed of the noise, 0 to 2^53 - 1; the same on both sides."),
                RewardType.Input(
                    "reward",
                    optional=True,
                    tooltip="Reward shown above the videos; without it the run's own.",
                ),
                FrozenLorasType.Input(
                    "speed_loras",
                    optional=True,
                    tooltip="LoRAs that are on in both videos, for example a speed LoRA; set steps "
                    "and guidance in the video settings to match.",
                ),
            ],
            outputs=[io.Video.Output(display_name="video")],
        )


class LoadRun(host.ComfyNode):
    """The result of a run on disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOLoadRun",
            display_name="Load Run",
            category=CATEGORY,
            is_output_node=True,
            description="The newest LoRA, the curve and the sample videos of a run in "
            "output/flashgrpo/runs.",
            inputs=[run_name("my_run")],
            outputs=[
                RunType.Output(display_name="run"),
                io.LoraModel.Output(display_name="lora"),
                io.Image.Output(display_name="curve"),
                io.Video.Output(display_name="samples", is_output_list=True),
            ],
        )
