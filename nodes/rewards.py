"""Rewards, one node each. Several are chained into a weighted mix.

The classes are written out, not generated: the registry reads their ids from the source.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from . import host
from . import reward_terms as terms
from .widgets import advanced

FAULTS = ("blur", "noise", "exposure", "flicker", "freeze")


class RewardTechnical(host.ComfyNode):
    """Reward: technical quality."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardTechnical",
            **terms.about(
                "technical",
                *(
                    terms.number(f, 1.0, 0.0, 1.0, f"How much {f} costs; 0 ignores it.")
                    for f in FAULTS
                ),
                terms.short_side(512, 32, 4096),
                added=(
                    terms.number(
                        "blocks", 1.0, 0.0, 1.0, "How much blocks costs; 0 ignores it.", True
                    ),
                ),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("technical", inputs)


class RewardMotion(host.ComfyNode):
    """Reward: movement."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardMotion",
            **terms.about(
                "motion",
                terms.number(
                    "enough",
                    0.5,
                    0.01,
                    100.0,
                    "Speed from which more movement is not rewarded, short sides of the frame per second.",
                ),
                terms.short_side(128, 32, 512),
                added=(terms.part("motion"),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("motion", inputs)


class RewardFlicker(host.ComfyNode):
    """Reward: steady brightness."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardFlicker",
            **terms.about(
                "flicker",
                terms.number(
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
        return terms.chain("flicker", inputs)


class RewardFreeze(host.ComfyNode):
    """Reward: no frozen pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardFreeze",
            **terms.about("freeze"),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("freeze", inputs)


class RewardLoopClosure(host.ComfyNode):
    """Reward: seamless loops."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardLoopClosure",
            **terms.about("loop_closure"),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("loop_closure", inputs)


class RewardBrightness(host.ComfyNode):
    """Reward: brightness."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardBrightness",
            **terms.about(
                "brightness",
                terms.number("target", 0.5, 0.0, 1.0, "Wanted brightness, 0 black, 1 white."),
                terms.frames(),
                added=(terms.every(),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("brightness", inputs)


class RewardContrast(host.ComfyNode):
    """Reward: contrast."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardContrast",
            **terms.about(
                "contrast",
                terms.number(
                    "target",
                    0.45,
                    0.0,
                    1.0,
                    "Wanted contrast, 0 flat, 1 half black and half white; photos lie near 0.45.",
                ),
                terms.frames(),
                added=(terms.every(),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("contrast", inputs)


class RewardColourfulness(host.ComfyNode):
    """Reward: colourfulness."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardColourfulness",
            **terms.about(
                "colourfulness",
                terms.number(
                    "target",
                    0.6,
                    0.0,
                    1.0,
                    "Wanted colourfulness, 0 grey, 1 extremely colourful; photos lie near 0.4.",
                ),
                terms.frames(),
                added=(terms.every(),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("colourfulness", inputs)


class RewardJpegSize(host.ComfyNode):
    """Reward: size as JPEG."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardJpegSize",
            **terms.about(
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
                terms.frames(),
                added=(terms.every(),),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("jpeg_size", inputs)


class RewardNaturalness(host.ComfyNode):
    """Reward: statistics of photographs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardNaturalness",
            **terms.about(
                "naturalness",
                terms.number(
                    "tolerance",
                    1.5,
                    0.01,
                    100.0,
                    "Distance beyond that of photographs that brings the reward down to 0.37.",
                ),
                terms.frames(),
                terms.every(4),
                terms.short_side(512, 32, 4096),
            ),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("naturalness", inputs)


class RewardOcr(host.ComfyNode):
    """Reward: readable text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardOcr",
            **terms.about(
                "ocr",
                io.String.Input(
                    "text",
                    default="",
                    placeholder="OPEN",
                    tooltip="Text to ask for in every video; empty: the text in quotation marks of "
                    "each prompt.",
                ),
                terms.frames(),
                terms.every(8),
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
        return terms.chain("ocr", inputs)


class RewardTinyWorld(host.ComfyNode):
    """Reward: what the tiny world's prompts ask for."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPORewardTinyWorld",
            **terms.about("tiny_world"),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Add the term."""
        return terms.chain("tiny_world", inputs)


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
