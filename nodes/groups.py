"""Group: which prompts an iteration samples, and where each one is stochastic."""

from __future__ import annotations

from comfy_api.latest import io

from . import host
from .values import GroupsType, PolicyType, PromptsType, VideoSettingsType
from .widgets import CATEGORY, advanced, seed, setting


class IsoTemporalGroups(host.ComfyNode):
    """The groups of the policy's next iteration."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOGroups",
            display_name="Iso-Temporal Groups",
            category=CATEGORY,
            description="Chooses the prompts of the next iteration and gives each one noise level "
            "(sigma) at which all its videos get their noise.",
            inputs=[
                PolicyType.Input("policy", tooltip="The policy whose next iteration this is."),
                PromptsType.Input("prompts", tooltip="Prompts to choose from."),
                VideoSettingsType.Input("video_settings", tooltip="Size and sampling."),
                setting("rollout", "group_size"),
                setting("rollout", "prompts_per_iteration"),
                setting("rollout", "noise"),
                io.Int.Input(
                    "window_first",
                    default=0,
                    min=0,
                    max=999,
                    tooltip="First sampling step that may be stochastic, 0 to steps - 2.",
                ),
                io.Int.Input(
                    "window_end",
                    default=0,
                    min=0,
                    max=999,
                    tooltip="Step behind the last one that may be stochastic; 0 = the first half of "
                    "the steps. The last step is never stochastic.",
                ),
                seed(
                    "Seed of all noise and of the order of the prompts, 0 to 2^53 - 1. Keep it "
                    "through a run."
                ),
                advanced(setting("schedule", "draw")),
                advanced(setting("schedule", "sde")),
                advanced(setting("schedule", "eta", step=0.05)),
                advanced(setting("schedule", "kind", name="schedule")),
            ],
            outputs=[
                GroupsType.Output(display_name="groups"),
                io.Image.Output(display_name="picture"),
            ],
        )
