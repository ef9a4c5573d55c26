"""Score: what the videos are worth, and how each compares with the others of its prompt."""

from __future__ import annotations

from comfy_api.latest import io

from . import host
from .values import RewardType, RolloutsType, ScoredType
from .widgets import CATEGORY, advanced, setting


class ScoreRollouts(host.ComfyNode):
    """Scores rollouts and compares the videos of each prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOScore",
            display_name="Score Rollouts",
            category=CATEGORY,
            description="Scores every video and compares it with the others of its prompt: the "
            "advantage. Stops with advice when all videos of every prompt score the same.",
            inputs=[
                RolloutsType.Input("rollouts", tooltip="The sampled groups."),
                RewardType.Input("reward", tooltip="The reward, or a chain of rewards."),
                advanced(setting("loss", "advantage_std")),
                advanced(setting("loss", "advantage_clamp", step=0.5)),
                advanced(setting("reward", "normalise")),
                advanced(setting("reward", "on_nan")),
            ],
            outputs=[
                ScoredType.Output(display_name="scored"),
                io.Image.Output(display_name="picture"),
            ],
        )
