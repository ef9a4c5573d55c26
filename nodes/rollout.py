"""Rollout: sample the videos of the groups with the policy."""

from __future__ import annotations

from comfy_api.latest import io

from . import host
from .values import GroupsType, PolicyType, RolloutsType
from .widgets import CATEGORY


class RolloutSampler(host.ComfyNode):
    """Samples all videos of the groups."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORollout",
            display_name="Rollout Sampler",
            category=CATEGORY,
            description="Samples every video of the groups: deterministic except for the one step "
            "whose noise the training learns from.",
            inputs=[
                PolicyType.Input("policy", tooltip="The policy that the groups were made for."),
                GroupsType.Input("groups", tooltip="The groups of this iteration."),
            ],
            outputs=[
                RolloutsType.Output(display_name="rollouts"),
                io.Video.Output(display_name="videos", is_output_list=True),
                io.Image.Output(display_name="contact_sheet"),
            ],
        )
