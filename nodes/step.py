"""Step: one change of the policy from scored rollouts."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..flashgrpo_core.errors import FlashGRPOError
from . import host, pictures
from .pictures import to_image
from .settings import merge
from .stepping import take_step
from .values import Policy, PolicyType, Scored, ScoredType, Tables
from .widgets import CATEGORY, advanced, chosen, setting


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

    @classmethod
    def execute(
        cls,
        policy: Policy,
        scored: Scored,
        learning_rate: float,
        clip: float,
        kl: float,
        rectification: str,
        warmup: int,
        max_grad_norm: float,
        weight_decay: float,
        ema_decay: float,
        updates_per_rollout: int,
    ) -> io.NodeOutput:
        """Take the step and save it."""
        groups = scored.source.source
        if not groups.of(policy):
            raise FlashGRPOError(
                f"the scored videos come from run {groups.run!r} at iteration "
                f"{groups.iteration - 1}, the policy is run {policy.run!r} at {policy.iteration}: "
                "connect the policy that sampled them"
            )
        settings: Tables = {
            "reward": {"terms": [dict(term) for term in scored.terms]},
            "loss": {"clip": clip, "kl": kl, "rectification": rectification},
            "optim": {
                **chosen("optim", "learning_rate", learning_rate),
                **chosen("optim", "warmup", warmup),
                "max_grad_norm": max_grad_norm,
                "weight_decay": weight_decay,
                "ema_decay": ema_decay,
                "updates_per_rollout": updates_per_rollout,
            },
        }
        tables = merge(groups.tables, scored.tables, settings)
        new, record = take_step(policy, scored, tables)
        title = f"{new.run}: iteration {new.iteration}, step {new.state['optimizer_steps']}"
        if new.run != policy.run:
            title += f" (a branch of {policy.run})"
        picture = to_image(pictures.metrics(_rows(record), title))
        return io.NodeOutput(new, picture, ui=ui.PreviewImage(picture))


def _rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    """What the step's picture says."""
    reward = record["reward"]
    by_sigma = ", ".join(
        f"{sigma}: {norm['raw']:.1e} -> {norm['rectified']:.1e}"
        for sigma, norm in record["grad_norm_by_sigma"].items()
    )
    return [
        ("optimizer steps", str(record["optimizer_steps"])),
        ("reward", f"{reward['mean']:.4f}, spread {reward['std']:.4f}"),
        ("groups without signal", f"{record['zero_variance_groups']} of {record['groups']}"),
        ("loss", f"{record['loss']:.3e}"),
        ("gradient norm", f"{record['grad_norm']:.3e} (clipped at {record['max_grad_norm']:.1e})"),
        ("by sigma, raw -> rectified", by_sigma),
        ("clipped", f"{100 * record['clip_fraction']:.1f} %"),
        ("ratio drift", f"{record['ratio_drift']:.1e}"),
        ("KL divergence", f"{record['kl']:.3e}"),
        ("learning rate", f"{record['lr']:.2e}"),
        ("transformer forwards so far", f"{record['forwards_total']:,}"),
        ("saved as", record["saved"]),
    ]
