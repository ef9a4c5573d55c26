"""Step: one change of the policy from scored rollouts."""

from __future__ import annotations

from comfy_api.latest import io

from . import host
from .values import PolicyType, ScoredType
from .widgets import CATEGORY, advanced, setting


class TrainStep(host.ComfyNode):
    """One iteration's optimizer step."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOTrainStep",
            display_name="Train Step",
            category=CATEGORY,
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            description="Changes the policy so that videos with a high advantage become more likely. "
            "The result is saved in the run folder: queue again for the next iteration.",
            inputs=[
                PolicyType.Input("policy", tooltip="The policy that sampled the rollouts."),
                ScoredType.Input("scored", tooltip="Scored rollouts of this policy."),
                setting("optim", "learning_rate", auto=-1, step=1e-6),
                setting("loss", "clip", step=1e-4),
                setting("loss", "kl", step=0.001),
                advanced(setting("loss", "rectification")),
                advanced(setting("optim", "warmup", auto=-1)),
                advanced(setting("optim", "max_grad_norm", step=0.001)),
                advanced(setting("optim", "weight_decay", step=1e-5)),
                advanced(setting("optim", "ema_decay")),
                advanced(setting("optim", "updates_per_rollout")),
            ],
            outputs=[
                PolicyType.Output(display_name="policy"),
                io.Image.Output(display_name="picture"),
            ],
        )
