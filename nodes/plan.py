"""Plan: memory of a run per phase, before anything is loaded."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..flashgrpo_core.config_io import build_config
from ..flashgrpo_core.embedded import with_embedded_files
from ..flashgrpo_core.memory import plan_memory
from ..flashgrpo_core.memory_fit import CARDS, fit
from ..flashgrpo_core.memory_text import card_table, phase_table
from ..flashgrpo_core.model_shapes import model_shapes
from . import host
from .settings import merge
from .values import (
    Advanced,
    AdvancedType,
    Policy,
    PolicyType,
    VideoSettings,
    VideoSettingsType,
)
from .widgets import CATEGORY


class Plan(host.ComfyNode):
    """Predicts what a run takes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOPlan",
            display_name="Plan",
            category=CATEGORY,
            description="Predicts the memory of every phase of a run from the sizes of its files, "
            "which cards hold it, and what to change when yours does not. Nothing is loaded.",
            is_output_node=True,
            inputs=[
                PolicyType.Input("policy", tooltip="The model that would be trained."),
                VideoSettingsType.Input("video_settings", tooltip="Size and sampling."),
                AdvancedType.Input(
                    "advanced", optional=True, tooltip="Settings that replace the preset's."
                ),
                io.Int.Input(
                    "card",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="Memory of the card in GB; 0 = all usual ones, 12 to 80.",
                ),
            ],
            outputs=[io.String.Output(display_name="plan")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        policy: Policy,
        video_settings: VideoSettings,
        card: int,
        advanced: Advanced | None = None,
    ) -> io.NodeOutput:
        """Plan with one network at a time on the card, as ComfyUI keeps it."""
        own = merge(advanced.tables) if advanced else {}
        own.get("schedule", {}).pop("window", None)  # which steps are trained takes no memory
        files = merge({"model": policy.files.table()}, {"model": {"offload": True}})
        config = with_embedded_files(build_config(merge(video_settings.tables, own, files)))
        shapes = model_shapes(config)
        cards = [fit(config, shapes, size) for size in ((card,) if card else CARDS)]
        text = f"{phase_table(plan_memory(config, shapes))}\n\n{card_table(cards)}"
        host.show_text(text)
        return io.NodeOutput(text, ui=ui.PreviewText(text))
