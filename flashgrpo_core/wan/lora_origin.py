"""Whether a LoRA file was made for the model it is put on.

The weights cannot tell the experts of Wan 2.2 A14B apart, and 14B models of several families have
equal shapes, so a mix-up loads without a word and only looks wrong. The header of our own files
says what they are for, and file names usually say the expert.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import FlashGRPOError
from ..files import open_tensors
from .detect import WanSpec

_HINT = re.compile(r"(high|low)[ _-]?noise", re.IGNORECASE)

#: Families whose weights have the same shapes and names; their LoRAs are used on each other.
_ALIKE = {"wan2.2-t2v-a14b": "wan2.1-t2v"}
_FAMILIES = ("wan2.1-t2v", "wan2.1-i2v", "wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b")


def expert_hint(path: str | Path) -> str:
    """`high_noise` or `low_noise` when the file name says exactly one of them, else empty."""
    found = {match.lower() for match in _HINT.findall(Path(path).name)}
    return f"{found.pop()}_noise" if len(found) == 1 else ""


def expert_of(path: str | Path) -> str:
    """The expert that a LoRA file is for, by its header or else its name; empty when unknown."""
    return open_tensors(path).metadata.get("flashgrpo.expert", "") or expert_hint(path)


def check_origin(path: str | Path, spec: WanSpec, expert: str = "") -> None:
    """Refuse a LoRA of another family or expert; files that say nothing pass.

    Args:
        path: the LoRA file.
        spec: the model that it is put on.
        expert: the expert that it is put on, or empty.

    Raises:
        FlashGRPOError: with the reason and the fix.
    """
    file = open_tensors(path)
    header = file.metadata
    family = header.get("flashgrpo.base_family") or header.get("ss_base_model_version", "")
    mine, its = _ALIKE.get(spec.family, spec.family), _ALIKE.get(family, family)
    if family in _FAMILIES and mine != its:
        raise FlashGRPOError(
            f"LoRA {Path(path).name!r} was made for {family}, the model is {spec.family}: use a "
            "LoRA of the same model"
        )
    said = header.get("flashgrpo.expert", "")
    source = "its header says" if said else "its file name says"
    said = said or expert_hint(path)
    if expert and said and said != expert:
        raise FlashGRPOError(
            f"LoRA {Path(path).name!r} is put on the {expert} expert, but {source} {said}: "
            f"use the {expert} file of the pair"
        )
