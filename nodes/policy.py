"""Nodes that say what is trained: the policy, LoRAs that belong to its base, the video settings."""

from __future__ import annotations

import re
from typing import Any

from comfy_api.latest import io

from ..flashgrpo_core.config_io import build_config
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.presets import FORMER, PRESETS, preset_tables
from . import host, pool
from .embeddings import TINY
from .settings import load_policy, merge, newest_iteration, run_folder
from .values import (
    FrozenLoras,
    FrozenLorasType,
    ModelFiles,
    PolicyType,
    VideoSettings,
    VideoSettingsType,
)
from .widgets import CATEGORY, PRESET, advanced, run_name, setting


class LoadPolicy(host.ComfyNode):
    """The policy of a run: model files, LoRA shape and the newest weights on disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOLoadPolicy",
            display_name="Load Wan Policy",
            category=CATEGORY,
            description="A Wan model with a trainable LoRA. Continues the run of this name where it "
            "stands on disk, or starts it. Nothing is loaded into memory until a node needs it.",
            inputs=[
                run_name("my_run"),
                io.Combo.Input(
                    "diffusion_model",
                    options=host.model_choices("diffusion_models", tiny=True),
                    default=host.TINY_CHOICE,
                    tooltip="Wan diffusion model (.safetensors from models/diffusion_models; bf16, "
                    "fp16, fp8 and fp8-scaled work), or the embedded tiny Wan. For Wan 2.2 14B this "
                    "is the high-noise expert.",
                ),
                io.Combo.Input(
                    "low_noise_model",
                    options=[host.NONE_CHOICE, *host.model_choices("diffusion_models")],
                    default=host.NONE_CHOICE,
                    tooltip="Low-noise expert of Wan 2.2 14B; none for every other Wan model.",
                ),
                io.Combo.Input(
                    "vae",
                    options=host.model_choices("vae", tiny=True),
                    default=host.TINY_CHOICE,
                    tooltip="Wan VAE (.safetensors from models/vae): wan_2.1_vae for Wan 2.1 and "
                    "2.2 14B, wan2.2_vae for 2.2 5B, or the embedded tiny VAE of the tiny Wan.",
                ),
                setting("model", "dtype"),
                setting("model", "lora_rank", note="More can learn more and takes more memory."),
                setting("model", "lora_alpha", note="Usual: twice the rank."),
                io.String.Input(
                    "lora_targets",
                    default="attention",
                    tooltip="Which layers get a LoRA, separated by commas: attention, ffn, or "
                    "module-name endings such as attn1.to_q. Each must match.",
                ),
                io.Combo.Input(
                    "continue_from",
                    options=[host.NONE_CHOICE, *host.model_choices("loras")],
                    default=host.NONE_CHOICE,
                    tooltip="LoRA whose weights training starts from; it is then also the reference "
                    "policy. Its rank must be lora_rank.",
                ),
                FrozenLorasType.Input(
                    "frozen_loras",
                    optional=True,
                    tooltip="LoRAs that stay on during training and belong to the base (a speed "
                    "LoRA, a style). Use them when sampling, too.",
                ),
                setting("model", "train_experts", optional=True),
                advanced(setting("model", "boundary", step=0.005, optional=True)),
                io.Combo.Input(
                    "continue_from_low",
                    options=[host.NONE_CHOICE, *host.model_choices("loras")],
                    default=host.NONE_CHOICE,
                    optional=True,
                    tooltip="Like continue_from, for the low-noise expert of Wan 2.2 14B.",
                ),
                io.Combo.Input(
                    "clip_vision",
                    options=[host.NONE_CHOICE, *host.model_choices("clip_vision")],
                    default=host.NONE_CHOICE,
                    optional=True,
                    tooltip="CLIP vision model (clip_vision_h.safetensors from models/clip_vision); "
                    "Wan 2.1 image-to-video needs it, no other Wan does.",
                ),
                advanced(setting("model", "storage", auto=PRESET, optional=True)),
                advanced(setting("model", "blocks_to_swap", auto=-1, optional=True)),
            ],
            outputs=[PolicyType.Output(display_name="policy")],
        )

    @classmethod
    def fingerprint_inputs(cls, run_name: str, **_: Any) -> list[Any]:
        """The newest iteration on disk: queueing again goes on from there."""
        try:
            folder = run_folder(run_name)
            created = pool.stamp(folder.config_path) if folder.exists() else ()
            return [newest_iteration(run_name), *created]
        except (FlashGRPOError, OSError) as exc:
            return [str(exc)]  # execute will say it

    @classmethod
    def execute(
        cls,
        run_name: str,
        diffusion_model: str,
        low_noise_model: str,
        vae: str,
        dtype: str,
        lora_rank: int,
        lora_alpha: float,
        lora_targets: str,
        continue_from: str,
        frozen_loras: FrozenLoras | None = None,
        train_experts: str = "both",
        boundary: float = 0.0,
        continue_from_low: str = host.NONE_CHOICE,
        clip_vision: str = host.NONE_CHOICE,
        storage: str = PRESET,
        blocks_to_swap: int = -1,
    ) -> io.NodeOutput:
        """Look the run up; nothing is loaded."""
        tiny = diffusion_model == host.TINY_CHOICE
        if tiny != (vae == host.TINY_CHOICE):
            raise FlashGRPOError(
                f"diffusion model {diffusion_model!r} and VAE {vae!r} do not belong together: "
                "choose the tiny one for both, or a file for both"
            )
        targets = tuple(part.strip() for part in lora_targets.split(",") if part.strip())
        odd = [target for target in targets if not re.fullmatch(r"[\w.]{1,100}", target)]
        if not targets or odd:
            raise FlashGRPOError(
                f"lora_targets {lora_targets[:80]!r} must be names of layers, separated by commas: "
                "write attention, or attention, ffn"
            )
        files = ModelFiles(
            transformer=TINY if tiny else host.model_path("diffusion_models", diffusion_model),
            vae="" if tiny else host.model_path("vae", vae),
            dtype=dtype,
            rank=lora_rank,
            alpha=lora_alpha,
            targets=targets,
            continue_from=_chosen("loras", continue_from),
            frozen=frozen_loras or FrozenLoras(()),
            transformer_low=_chosen("diffusion_models", low_noise_model),
            train_experts=train_experts,
            boundary=boundary,
            continue_from_low=_chosen("loras", continue_from_low),
            clip_vision=_chosen("clip_vision", clip_vision),
            storage="" if storage == PRESET else storage,
            blocks_to_swap=blocks_to_swap,
        )
        return io.NodeOutput(load_policy(files, run_name))


def _chosen(kind: str, name: str) -> str:
    """Path of a listed file, empty for none."""
    return "" if name == host.NONE_CHOICE else host.model_path(kind, name)


class FrozenLora(host.ComfyNode):
    """A LoRA that belongs to the base model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOFrozenLora",
            display_name="Frozen LoRA",
            category=CATEGORY,
            description="A LoRA that stays on and is not trained. Several can be chained.",
            inputs=[
                io.Combo.Input(
                    "lora",
                    options=host.model_choices("loras") or [host.NONE_CHOICE],
                    tooltip="LoRA file (.safetensors from models/loras or output/loras).",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    round=False,
                    tooltip="Strength of the LoRA, -10 to 10; 0 leaves it out.",
                ),
                FrozenLorasType.Input(
                    "previous", optional=True, tooltip="Further frozen LoRAs, applied before."
                ),
                io.Combo.Input(
                    "expert",
                    options=["both", "high_noise", "low_noise"],
                    default="both",
                    optional=True,
                    tooltip="With two experts (Wan 2.2 14B), which one it goes on; both for every "
                    "other model.",
                ),
            ],
            outputs=[FrozenLorasType.Output(display_name="frozen_loras")],
        )

    @classmethod
    def execute(
        cls,
        lora: str,
        strength: float,
        previous: FrozenLoras | None = None,
        expert: str = "both",
    ) -> io.NodeOutput:
        """Add the LoRA to the chain."""
        before = previous.loras if previous else ()
        if strength == 0:
            return io.NodeOutput(FrozenLoras(before))
        own = (host.model_path("loras", lora), strength, "" if expert == "both" else expert)
        return io.NodeOutput(FrozenLoras((*before, own)))


class VideoSettingsNode(host.ComfyNode):
    """Size, length and sampling of the videos."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""

        def over(key: str, table: str = "rollout", step: float | None = None) -> object:
            return setting(table, key, auto=0, step=step)

        return io.Schema(
            node_id="FlashGRPOVideoSettings",
            display_name="Video Settings",
            category=CATEGORY,
            description="What a training video looks like and how it is sampled. Train at the size, "
            "steps, shift and guidance you render with.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, *FORMER],
                    default=next(iter(PRESETS)),
                    tooltip="Model and card: sets everything below that is 0, and how many videos "
                    "go through the model together.",
                ),
                over("width", step=16),
                over("height", step=16),
                over("frames", step=4),
                over("fps"),
                over("steps", "schedule"),
                setting("schedule", "shift", auto=0, step=0.1),
                over("guidance", step=0.1),
                advanced(over("micro_batch")),
                advanced(over("decode_batch")),
                setting("rollout", "guidance_low", auto=0, step=0.1, optional=True),
            ],
            outputs=[VideoSettingsType.Output(display_name="video_settings")],
        )

    @classmethod
    def execute(cls, preset: str, **values: float) -> io.NodeOutput:
        """Fill in the preset, and check that it is a video Wan can make."""
        tables = preset_tables(preset, values)
        build_config(merge({"model": {"transformer": TINY}}, tables))
        return io.NodeOutput(VideoSettings(preset, tables))
