"""Nodes for text: the prompts of a run, and one prompt as conditioning for stock samplers."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from comfy_api.latest import io

from ..flashgrpo_core import embedded
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.files import resolve_inside
from ..flashgrpo_core.prompts import Prompt, parse_prompts, read_prompts
from . import host, pool
from .embeddings import TINY, embed, embed_with_clip
from .values import Policy, PolicyType, Prompts, PromptsType
from .widgets import CATEGORY, advanced, setting

FROM_TEXT = "the text below"
STARTER = "starter prompts (embedded)"
TINY_WORLD = "tiny world (embedded)"
FROM_CLIP = "the connected CLIP"
STARTER_FILE = embedded.TINY_FOLDER.parent / "prompts" / "starter.txt"

Part = tuple[Prompt, ...]

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
                io.Image.Input(
                    "start_image",
                    optional=True,
                    tooltip="First frame of the videos, for image-to-video models: one image for all "
                    "prompts, or a batch with one for each prompt in order. Prompts that name an "
                    "image in their .jsonl file keep it.",
                ),
            ],
            outputs=[PromptsType.Output(display_name="prompts")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, source: str, **_: Any) -> list[Any]:
        """The state of the prompts file, so that an edited one is read again."""
        if source not in host.prompt_files():
            return [str(source)]
        return [*pool.stamp(host.input_folder() / source)]

    @classmethod
    def execute(
        cls,
        source: str,
        text: str,
        negative: str,
        validation_share: float,
        test_share: float,
        text_encoder: str,
        text_tokens: int,
        clip: Any = None,
        start_image: torch.Tensor | None = None,
    ) -> io.NodeOutput:
        """Read the prompts; a connected CLIP encodes them."""
        train, validation, test = _read(source, text)
        if start_image is not None:
            train, validation, test = _with_images(start_image, train, validation, test)
        prompts = Prompts(
            train,
            validation,
            test,
            negative.strip(),
            validation_share,
            test_share,
            _encoder(text_encoder),
            text_tokens,
        )
        if text_encoder != FROM_CLIP:
            return io.NodeOutput(prompts)
        if clip is None:
            raise FlashGRPOError(
                "text_encoder is 'the connected CLIP' but none is connected: connect CLIPLoader "
                "(type wan), or choose a text encoder file"
            )
        texts = {p.text for part in (train, validation or (), test or ()) for p in part}
        fingerprint, folder = embed_with_clip(clip, texts | {prompts.negative}, pool.control())
        return io.NodeOutput(
            dataclasses.replace(prompts, encoder=f"clip:{fingerprint}", folder=folder)
        )


def _encoder(choice: str) -> str:
    if choice == FROM_CLIP:
        return ""
    return TINY if choice == host.TINY_CHOICE else host.model_path("text_encoders", choice)


def _with_images(
    images: torch.Tensor, train: Part, validation: Part | None, test: Part | None
) -> tuple[Part, Part | None, Part | None]:
    """Prompts with the connected start image, or each with its own of a batch."""
    count = len(train) + len(validation or ()) + len(test or ())
    if len(images) not in (1, count):
        raise FlashGRPOError(
            f"start_image holds {len(images)} images for {count} prompts: connect one image, or as "
            "many as there are prompts"
        )
    paths = iter([host.keep_image(image) for image in images] * (count if len(images) == 1 else 1))

    def own(part: Part) -> Part:
        return tuple(Prompt(p.text, p.image or path) for p, path in zip(part, paths, strict=False))

    # `zip` asks the prompts first, so no image is lost between the parts.
    return (
        own(train),
        None if validation is None else own(validation),
        None if test is None else own(test),
    )


def _read(source: str, text: str) -> tuple[Part, Part | None, Part | None]:
    """Training, validation and test prompts; the latter are None when a share is held out."""
    if source == TINY_WORLD:
        parts = [tuple(read_prompts(embedded.TINY_PROMPTS[p])) for p in embedded.TINY_PROMPTS]
        return parts[0], parts[1], parts[2]
    if source == STARTER:
        return tuple(read_prompts(STARTER_FILE)), None, None
    if source == FROM_TEXT:
        found = parse_prompts(text, where="the prompts text")
        if not found:
            raise FlashGRPOError("the prompts text is empty: write one prompt a line")
        return tuple(found), None, None
    return tuple(_from_input(source)), None, None


def _from_input(name: str) -> list[Prompt]:
    """Prompts of a file in the input folder; start images must lie in that folder, too."""
    folder = host.input_folder()
    path = resolve_inside(folder, name)
    found = []
    for prompt in read_prompts(path):
        image = prompt.image
        if image is not None:
            inside = resolve_inside(folder, os.path.relpath(image, path.parent))
            if not inside.is_file():
                raise FlashGRPOError(
                    f"start image {image[-80:]!r} of {name!r} does not exist in the input folder"
                )
            image = str(inside)
        found.append(Prompt(prompt.text, image))
    return found


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
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, text: str, text_encoder: str, policy: Policy | None = None) -> io.NodeOutput:
        """Encode the prompt, or take it from the disk."""
        prompts = Prompts((), None, None, "", 0.0, 0.0, _encoder(text_encoder))
        files = None if policy is None else policy.files
        embedding = embed(prompts, files, [text], pool.control())[text]  # [tokens, 4096]
        return io.NodeOutput([[embedding[None].clone(), {}]])
