"""Rewards, one node each, and the node that scores rollouts with a mix of them.

The node classes are written out, not generated: the registry reads their ids from the source.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..flashgrpo_core.rewards.mix import RewardMix
from ..flashgrpo_core.rewards.motion import MotionReward
from ..flashgrpo_core.rewards.technical import TechnicalReward
from ..flashgrpo_core.rewards.tiny_world import TinyWorldReward
from . import host
from .values import Reward, RewardType, RolloutsType, ScoredType
from .widgets import CATEGORY, advanced, setting


def _inputs(*options: Any) -> list[Any]:
    """Weight, the reward's own options, and the chain."""
    return [
        io.Float.Input(
            "weight",
            default=1.0,
            min=-100.0,
            max=100.0,
            step=0.05,
            round=False,
            tooltip="Weight in the mix, -100 to 100; negative punishes. Terms are standardised "
            "before they are weighted, so 1 and 1 count equally.",
        ),
        *options,
        RewardType.Input(
            "previous", optional=True, tooltip="Further rewards: a chain is a weighted mix."
        ),
    ]


def _number(name: str, default: float, low: float, high: float, tip: str) -> Any:
    return io.Float.Input(
        name,
        default=default,
        min=low,
        max=high,
        step=0.05,
        round=False,
        tooltip=f"{tip} Range {low:g} to {high:g}.",
    )


def _short_side(default: int, low: int, high: int) -> Any:
    return advanced(
        io.Int.Input(
            "short_side",
            default=default,
            min=low,
            max=high,
            tooltip=f"Larger frames are scaled down to this short side first, {low} to {high} "
            "pixels: smaller is faster.",
        )
    )


def _schema(node_id: str, display_name: str, cls: Any, inputs: list[Any]) -> io.Schema:
    return io.Schema(
        node_id=node_id,
        display_name=display_name,
        category=f"{CATEGORY}/rewards",
        description=f"{cls.description} {cls.range}; {cls.direction}. Can be cheated by: "
        f"{cls.hackable_by}.",
        inputs=inputs,
        outputs=[RewardType.Output(display_name="reward")],
    )


def _chain(
    name: str, weight: float, previous: Reward | None, options: dict[str, Any]
) -> io.NodeOutput:
    """A term behind the previous ones; built once here, so that bad options fail on this node."""
    terms = (*(previous.terms if previous else ()), {"name": name, "weight": weight, **options})
    RewardMix([dict(term) for term in terms])
    return io.NodeOutput(Reward(terms))


class RewardMotion(host.ComfyNode):
    """Reward: movement."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return _schema(
            node_id="FlashGRPORewardMotion",
            display_name="Reward: Motion",
            cls=MotionReward,
            inputs=_inputs(
                _number(
                    "enough",
                    0.5,
                    0.01,
                    100.0,
                    "Speed from which more movement is not rewarded, short sides of the frame per "
                    "second.",
                ),
                _short_side(128, 32, 512),
            ),
        )

    @classmethod
    def execute(
        cls, weight: float, previous: Reward | None = None, **options: Any
    ) -> io.NodeOutput:
        """Add the term."""
        return _chain("motion", weight, previous, options)


class RewardTechnical(host.ComfyNode):
    """Reward: technical quality."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        faults = [
            _number(fault, 1.0, 0.0, 1.0, f"How much {text} costs; 0 ignores it.")
            for fault, text in (
                ("blur", "blur"),
                ("noise", "noise"),
                ("exposure", "clipped light and dark"),
                ("flicker", "flicker"),
                ("freeze", "a frozen picture"),
            )
        ]
        return _schema(
            node_id="FlashGRPORewardTechnical",
            display_name="Reward: Technical Quality",
            cls=TechnicalReward,
            inputs=_inputs(*faults, _short_side(512, 32, 4096)),
        )

    @classmethod
    def execute(
        cls, weight: float, previous: Reward | None = None, **options: Any
    ) -> io.NodeOutput:
        """Add the term."""
        return _chain("technical", weight, previous, options)


class RewardTinyWorld(host.ComfyNode):
    """Reward: what the tiny world's prompts ask for."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return _schema(
            node_id="FlashGRPORewardTinyWorld",
            display_name="Reward: Tiny World",
            cls=TinyWorldReward,
            inputs=_inputs(),
        )

    @classmethod
    def execute(
        cls, weight: float, previous: Reward | None = None, **options: Any
    ) -> io.NodeOutput:
        """Add the term."""
        return _chain("tiny_world", weight, previous, options)


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
