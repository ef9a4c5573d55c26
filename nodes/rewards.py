"""Rewards, one node each. Several are chained into a weighted mix.

The classes are written out, not generated: the registry reads their ids from the source.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..flashgrpo_core.rewards import REWARDS
from ..flashgrpo_core.rewards.mix import RewardMix
from ..flashgrpo_core.rewards.options import AGGREGATES
from . import host
from .values import Reward, RewardType
from .widgets import CATEGORY, advanced

FAULTS = ("blur", "noise", "exposure", "flicker", "freeze")
#: Choice of a reward's total instead of one of its parts.
TOTAL = "total"


def _about(name: str, *options: Any, added: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The rest of a schema: weight, the reward's own options, and the chain.

    Args:
        name: name of the reward.
        *options: widgets of its options.
        added: widgets of options that came later; optional, for graphs that were saved before.
    """
    reward: Any = REWARDS[name]
    weight = io.Float.Input(
        "weight",
        default=1.0,
        min=-100.0,
        max=100.0,
        step=0.05,
        round=False,
        tooltip="Weight in the mix, -100 to 100; negative punishes. Terms are standardised before "
        "they are weighted, so 1 and 1 count equally.",
    )
    previous = RewardType.Input(
        "previous", optional=True, tooltip="Further rewards: a chain is a weighted mix."
    )
    return {
        "display_name": f"Reward: {reward.title}",
        "category": f"{CATEGORY}/rewards",
        "description": f"{reward.description} {reward.range}; {reward.direction}. Can be cheated "
        f"by: {reward.hackable_by}.",
        "inputs": [weight, *options, previous, *added],
        "outputs": [RewardType.Output(display_name="reward")],
    }


def _chain(name: str, inputs: dict[str, Any]) -> io.NodeOutput:
    """A term behind the previous ones; built here, so that a bad option fails on its own node."""
    previous = inputs.pop("previous", None)
    if inputs.get("part") == TOTAL:
        del inputs["part"]
    terms = (*(previous.terms if previous else ()), {"name": name, **inputs})
    RewardMix([dict(term) for term in terms])
    return io.NodeOutput(Reward(terms))


def _number(
    name: str, default: float, low: float, high: float, tip: str, optional: bool = False
) -> Any:
    return io.Float.Input(
        name,
        optional=optional,
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


def _frames() -> Any:
    return advanced(
        io.Combo.Input(
            "frames",
            options=list(AGGREGATES),
            default="mean",
            tooltip="How the scores of the frames become that of the video; top30 and bottom30 are "
            "the means of the best and the worst 30 percent, q25 is the quantile at 25 percent.",
        )
    )


def _every(default: int = 1) -> Any:
    return advanced(
        io.Int.Input(
            "every",
            optional=True,
            default=default,
            min=1,
            max=1024,
            tooltip="Use every n-th frame, the first one always, 1 to 1024: larger is faster.",
        )
    )


def _part(name: str) -> Any:
    reward: Any = REWARDS[name]
    return advanced(
        io.Combo.Input(
            "part",
            optional=True,
            options=[TOTAL, *reward.parts],
            default=TOTAL,
            tooltip="What counts: the reward's total, or one of its parts alone. Chain the node "
            "twice for two parts with weights of their own.",
        )
    )


class RewardTechnical(host.ComfyNode):
    """Reward: technical quality."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardTechnical",
            **_about(
                "technical",
                *(_number(f, 1.0, 0.0, 1.0, f"How much {f} costs; 0 ignores it.") for f in FAULTS),
                _short_side(512, 32, 4096),
                added=(
                    _number("blocks", 1.0, 0.0, 1.0, "How much blocks costs; 0 ignores it.", True),
                ),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("technical", inputs)


class RewardMotion(host.ComfyNode):
    """Reward: movement."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardMotion",
            **_about(
                "motion",
                _number(
                    "enough",
                    0.5,
                    0.01,
                    100.0,
                    "Speed from which more movement is not rewarded, short sides of the frame per second.",
                ),
                _short_side(128, 32, 512),
                added=(_part("motion"),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("motion", inputs)


class RewardFlicker(host.ComfyNode):
    """Reward: steady brightness."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardFlicker",
            **_about(
                "flicker",
                _number(
                    "tolerance",
                    4.0,
                    0.01,
                    255.0,
                    "Swing of the brightness in grey levels that brings the reward down to 0.37.",
                ),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("flicker", inputs)


class RewardFreeze(host.ComfyNode):
    """Reward: no frozen pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardFreeze",
            **_about("freeze"),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("freeze", inputs)


class RewardLoopClosure(host.ComfyNode):
    """Reward: seamless loops."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardLoopClosure",
            **_about("loop_closure"),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("loop_closure", inputs)


class RewardBrightness(host.ComfyNode):
    """Reward: brightness."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardBrightness",
            **_about(
                "brightness",
                _number("target", 0.5, 0.0, 1.0, "Wanted brightness, 0 black, 1 white."),
                _frames(),
                added=(_every(),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("brightness", inputs)


class RewardContrast(host.ComfyNode):
    """Reward: contrast."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardContrast",
            **_about(
                "contrast",
                _number(
                    "target",
                    0.45,
                    0.0,
                    1.0,
                    "Wanted contrast, 0 flat, 1 half black and half white; photos lie near 0.45.",
                ),
                _frames(),
                added=(_every(),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("contrast", inputs)


class RewardColourfulness(host.ComfyNode):
    """Reward: colourfulness."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardColourfulness",
            **_about(
                "colourfulness",
                _number(
                    "target",
                    0.6,
                    0.0,
                    1.0,
                    "Wanted colourfulness, 0 grey, 1 extremely colourful; photos lie near 0.4.",
                ),
                _frames(),
                added=(_every(),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("colourfulness", inputs)


class RewardJpegSize(host.ComfyNode):
    """Reward: size as JPEG."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardJpegSize",
            **_about(
                "jpeg_size",
                io.Combo.Input(
                    "mode",
                    options=["compressible", "incompressible"],
                    default="compressible",
                    tooltip="compressible rewards plain frames, incompressible detailed ones.",
                ),
                advanced(
                    io.Int.Input(
                        "quality",
                        default=90,
                        min=1,
                        max=95,
                        tooltip="JPEG quality, 1 to 95: how fine the measure is.",
                    )
                ),
                _frames(),
                added=(_every(),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("jpeg_size", inputs)


class RewardNaturalness(host.ComfyNode):
    """Reward: statistics of photographs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardNaturalness",
            **_about(
                "naturalness",
                _number(
                    "tolerance",
                    1.5,
                    0.01,
                    100.0,
                    "Distance beyond that of photographs that brings the reward down to 0.37.",
                ),
                _frames(),
                _every(4),
                _short_side(512, 32, 4096),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("naturalness", inputs)


class RewardOcr(host.ComfyNode):
    """Reward: readable text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardOcr",
            **_about(
                "ocr",
                io.String.Input(
                    "text",
                    default="",
                    placeholder="OPEN",
                    tooltip="Text to ask for in every video; empty: the text in quotation marks of "
                    "each prompt.",
                ),
                _frames(),
                _every(8),
                advanced(
                    io.Int.Input(
                        "short_side",
                        default=256,
                        min=32,
                        max=1024,
                        tooltip="Smaller frames are enlarged to this short side first, 32 to 1024 "
                        "pixels.",
                    )
                ),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("ocr", inputs)


class RewardTinyWorld(host.ComfyNode):
    """Reward: what the tiny world's prompts ask for."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardTinyWorld",
            **_about("tiny_world"),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return _chain("tiny_world", inputs)


#: All reward nodes.
REWARD_NODES: tuple[type[host.ComfyNode], ...] = (
    RewardTechnical,
    RewardMotion,
    RewardFlicker,
    RewardFreeze,
    RewardLoopClosure,
    RewardBrightness,
    RewardContrast,
    RewardColourfulness,
    RewardJpegSize,
    RewardNaturalness,
    RewardOcr,
    RewardTinyWorld,
)
