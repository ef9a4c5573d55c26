"""Checks of what arrives in `execute`: ComfyUI lets much through that no widget would allow.

A workflow that someone shared is untrusted input: values outside their lists and ranges, NaN, text
where an object belongs, and widgets that another node feeds all reach the nodes unchecked.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..flashgrpo_core.errors import FlashGRPOError

#: Longest text of a one-line widget, and of a multiline one, in characters.
MAX_LINE = 512
MAX_TEXT = 2_000_000
#: Names that Windows keeps for devices.
RESERVED = r"(con|prn|aux|nul|(com|lpt)\d)(\.|$)"


def check_inputs(
    widgets: list[Any], values: Mapping[str, Any], classes: Mapping[str, type]
) -> dict[str, Any]:
    """The values of a node, each checked against its input's own description.

    Args:
        widgets: the inputs of the schema.
        values: what ComfyUI passes to `execute`.
        classes: Python class of each custom link type.

    Raises:
        FlashGRPOError: naming the input, the value and what is allowed.
    """
    known = {widget.id: widget for widget in widgets}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise FlashGRPOError(f"unknown input {unknown[0][:80]!r}: load the workflow again")
    checked = {}
    for name, value in values.items():
        widget = known[name]
        if value is None and widget.optional:
            continue
        checked[name] = _check(name, widget, value, classes)
    missing = [w.id for w in widgets if not w.optional and w.id not in checked]
    if missing:
        raise FlashGRPOError(f"input {missing[0]!r} is missing: connect or set it")
    return checked


def check_list_inputs(
    widgets: list[Any], values: Mapping[str, Any], classes: Mapping[str, type]
) -> dict[str, Any]:
    """The values of a node that takes lists, where every input arrives as a list.

    Links keep their lists, each element checked; the value of a widget is the first of its list.

    Raises:
        FlashGRPOError: see `check_inputs`.
    """
    kinds = {widget.id: str(widget.get_io_type()).split(",")[0] for widget in widgets}
    plain = ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO")
    lists = {n: v for n, v in values.items() if isinstance(v, list) and v}
    first = {name: value[0] for name, value in lists.items()}
    checked = check_inputs(widgets, first, classes)
    for name, value in lists.items():
        if kinds[name] not in plain and name in checked:
            others = [check_inputs(widgets, {**first, name: v}, classes)[name] for v in value[1:]]
            checked[name] = [checked[name], *others]
    return checked


def _check(name: str, widget: Any, value: Any, classes: Mapping[str, type]) -> Any:
    kinds = str(widget.get_io_type()).split(",")
    match kinds[0]:
        case "INT":
            return _number(name, widget, value, int)
        case "FLOAT":
            return _number(name, widget, value, float)
        case "BOOLEAN":
            if not isinstance(value, bool):
                raise FlashGRPOError(f"{name} = {shown(value)} must be true or false")
            return value
        case "STRING":
            return _text(name, value, MAX_TEXT if widget.multiline else MAX_LINE)
        case "COMBO":
            return _choice(name, value, widget.options)
    if not any(_is_a(value, kind, classes) for kind in kinds):
        raise FlashGRPOError(
            f"{name} = {shown(value)} is no {' or '.join(kinds)}: connect the output of a node "
            "that makes one"
        )
    return value


def _number(name: str, widget: Any, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FlashGRPOError(f"{name} = {shown(value)} must be a number")
    if not math.isfinite(value):
        raise FlashGRPOError(f"{name} = {value} must be a finite number")
    low, high = widget.min, widget.max
    if (low is not None and value < low) or (high is not None and value > high):
        raise FlashGRPOError(f"{name} = {value} is outside {low} to {high}")
    if kind is int and value != int(value):
        raise FlashGRPOError(f"{name} = {value} must be a whole number")
    return kind(value)


def _text(name: str, value: Any, limit: int) -> str:
    if not isinstance(value, str):
        raise FlashGRPOError(f"{name} = {shown(value)} must be text")
    if len(value) > limit:
        raise FlashGRPOError(
            f"{name} = {shown(value)} has {len(value)} characters, the limit is {limit}: shorten it"
        )
    if "\0" in value:
        raise FlashGRPOError(f"{name} = {shown(value)} holds a NUL character: remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise FlashGRPOError(
            f"{name} = {shown(value)} is no valid Unicode text: type it again"
        ) from None
    return value


def _choice(name: str, value: Any, options: list[Any]) -> Any:
    if isinstance(value, str):
        # A workflow saved on Windows may have the other slash.
        value = value.replace("\\", "/")
    if not isinstance(value, str) or value not in options:
        some = ", ".join(str(option) for option in options[:8])
        more = f", ... ({len(options)} in all)" if len(options) > 8 else ""
        raise FlashGRPOError(
            f"{name} = {shown(value)} is not in the list: choose one of {some}{more}"
        )
    return value


def _is_a(value: Any, kind: str, classes: Mapping[str, type]) -> bool:
    if kind in classes:
        return isinstance(value, classes[kind])
    if kind == "LORA_MODEL":
        return isinstance(value, dict) and all(
            isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items()
        )
    if kind == "VIDEO":
        return hasattr(value, "get_components")
    if kind == "IMAGE":
        return isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[-1] in (3, 4)
    if kind == "CLIP":
        return all(hasattr(value, name) for name in ("tokenize", "encode_from_tokens_scheduled"))
    raise AssertionError(f"no check for inputs of type {kind}")


def check_lora_name(name: str) -> None:
    """Check a name for a LoRA file below output/loras.

    Raises:
        FlashGRPOError: naming what is wrong with it.
    """
    parts = re.split(r"[\\/]", name)
    usable = r"\w([\w .,()+-]{0,98}[\w)+-])?"
    if not all(
        re.fullmatch(usable, part) and not re.match(RESERVED, part.lower()) for part in parts
    ):
        raise FlashGRPOError(
            f"LoRA name {name[:80]!r} is not usable: letters, digits, space, '.', '-', '_', at most "
            "100 in each part, no reserved Windows name; '/' makes a subfolder"
        )


def copy_new(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, complete or not at all.

    A hard link where the system can: nothing is written twice. Not on Windows, where a file that
    ComfyUI has mapped could then no longer be replaced under its other name.

    Raises:
        FlashGRPOError: the folder cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if os.name == "nt":
                raise OSError
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    except OSError as exc:
        raise FlashGRPOError(
            f"{str(target)!r} cannot be written: {exc.strerror or exc}: check free space and access"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # the folder may be what is wrong
            temporary.unlink(missing_ok=True)


def shown(value: Any) -> str:
    """A value for a message: short, on one line."""
    text = repr(value) if isinstance(value, (str, int, float, bool, list)) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}..."
