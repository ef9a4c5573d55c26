"""Nodes for text: the prompts of a run, and one prompt as conditioning for stock samplers."""

from __future__ import annotations

from comfy_api.latest import io

from . import host
from .values import PolicyType, PromptsType
from .widgets import CATEGORY, advanced, setting

FROM_TEXT = "the text below"
STARTER = "starter prompts (embedded)"
TINY_WORLD = "tiny world (embedded)"
FROM_CLIP = "the connected CLIP"

_ENCODER_TIP = (
    "Text encoder file (umt5_xxl_*.safetensors from models/text_encoders), or the tiny one that "
    "belongs to the tiny Wan"
)


class PromptsNode(host.ComfyNode):
    """The prompts of a run, what is held out, and how they are encoded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOPrompts",
            display_name="Prompts",
            category=CATEGORY,
            description="Prompts to train on. Some are held out: validation chooses the best "
            "weights, the test judges them once at the end.",
            inputs=[
                io.Combo.Input(
                    "source",
                    options=[FROM_TEXT, STARTER, TINY_WORLD, *host.prompt_files()],
                    default=FROM_TEXT,
                    tooltip="Where the prompts come from: the text below, prompts that come with the "
                    "pack, or a .txt (one prompt a line) or .jsonl file in the input folder.",
                ),
                io.String.Input(
                    "text",
                    multiline=True,
                    default="",
                    placeholder="one prompt a line; lines that start with # are skipped",
                    tooltip="One prompt a line; 24 or more are recommended, 4 is the least that can "
                    "be split. Used when source is 'the text below'.",
                ),
                io.String.Input(
                    "negative",
                    multiline=True,
                    default="",
                    placeholder="negative prompt",
                    tooltip="Negative prompt, used when guidance is above 1.",
                ),
                setting("prompts", "validation_share", step=0.05),
                setting("prompts", "test_share", step=0.05),
                io.Combo.Input(
                    "text_encoder",
                    options=[FROM_CLIP, *host.model_choices("text_encoders", tiny=True)],
                    default=host.TINY_CHOICE,
                    tooltip=f"{_ENCODER_TIP}, or the CLIP that is connected. It is loaded once, and "
                    "its results are kept on disk.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="CLIP from CLIPLoader (type wan); used when text_encoder says so.",
                ),
                advanced(setting("model", "text_tokens")),
            ],
            outputs=[PromptsType.Output(display_name="prompts")],
        )


class EncodePrompt(host.ComfyNode):
    """One prompt as CONDITIONING, without a CLIP object."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="FlashGRPOEncodePrompt",
            display_name="Encode Prompt",
            category=CATEGORY,
            description="Encodes a prompt for stock samplers as training does. Stock CLIPLoader "
            "cannot load the tiny text encoder; for real Wan models CLIPTextEncode does the same.",
            inputs=[
                io.String.Input(
                    "text", multiline=True, default="", tooltip="The prompt; empty is allowed."
                ),
                io.Combo.Input(
                    "text_encoder",
                    options=host.model_choices("text_encoders", tiny=True),
                    default=host.TINY_CHOICE,
                    tooltip=f"{_ENCODER_TIP}.",
                ),
                PolicyType.Input(
                    "policy",
                    optional=True,
                    tooltip="With a policy, the length of the text context is that of its model.",
                ),
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning")],
        )
