"""Widgets made from the configuration's own fields, so that help, range and choices agree."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from comfy_api.latest import io

from ..flashgrpo_core.config import Config

CATEGORY = "Flash-GRPO"
#: Choice that leaves a setting to the preset; numbers say the same with -1.
PRESET = "preset"
RUN_NAME_TIP = (
    "Name of the run and of its folder output/flashgrpo/runs/<name>. Letters, digits, '.', '-', "
    "'_', at most 64. The same name continues the run; another name starts a new one."
)


def advanced(widget: Any) -> Any:
    """Mark a widget as rarely used: Nodes 2.0 folds it away."""
    # The constructors of 0.3.75 do not know the keyword; the attribute works in every version.
    widget.extra_dict = {**(widget.extra_dict or {}), "advanced": True}
    return widget


def run_name(default: str) -> Any:
    """The run name. It has no socket: a linked name would be unknown to the fingerprint."""
    return io.String.Input("run_name", default=default, socketless=True, tooltip=RUN_NAME_TIP)


def seed(tooltip: str, default: int = 0) -> Any:
    """A seed that stays as it is: a new one at every queue would be a new configuration."""
    return io.Int.Input(
        "seed",
        default=default,
        min=0,
        max=2**53 - 1,
        control_after_generate=False,
        tooltip=tooltip,
    )


def setting(
    table: str,
    key: str,
    *,
    name: str | None = None,
    default: Any = None,
    auto: Any = None,
    step: float | None = None,
    note: str = "",
    optional: bool = False,
) -> Any:
    """The widget of one configuration field.

    Args:
        table: table of the configuration.
        key: field.
        name: widget id; default `key`.
        default: replaces the field's default.
        auto: value that leaves the setting to the preset (numbers only; choices get `preset`).
        step: step of the arrows.
        note: added to the help.
        optional: whether ComfyUI may leave the input out.
    """
    kind, field = _field(table, key)
    meta, name = field.metadata, name or key
    default = field.default if default is None else default
    low, high = meta["low"], meta["high"]
    tip = [meta["help"]]
    if low is not None and high is not None:
        tip.append(f"Range {low:g} to {high:g}.")
    if auto is not None:
        tip.append(f"{auto if kind in (int, float) else PRESET} = the preset's value.")
        default = kind(auto) if kind in (int, float) else auto
        low = None if low is None else min(low, auto)
    if note:
        tip.append(note)
    common: dict[str, Any] = {"tooltip": " ".join(tip), "optional": optional}
    if meta["choices"]:
        options = list(meta["choices"])
        if auto is not None:
            options, default = [PRESET, *options], PRESET
        return io.Combo.Input(name, options=options, default=default, **common)
    if kind is bool and auto is None:
        return io.Boolean.Input(name, default=default, **common)
    if kind is bool:
        return io.Combo.Input(name, options=[PRESET, "on", "off"], default=PRESET, **common)
    if kind is int:
        return io.Int.Input(
            name,
            default=default,
            min=low,
            max=min(high, 2**53 - 1),
            step=int(step or 1),
            **common,
        )
    if kind is float:
        return io.Float.Input(
            name, default=default, min=low, max=high, step=step or 0.01, round=False, **common
        )
    return io.String.Input(name, default=default, **common)


def chosen(table: str, key: str, value: Any, auto: Any = -1) -> dict[str, Any]:
    """`{key: value}` for a widget with `auto`, or `{}` when it leaves the setting to the preset."""
    kind, _ = _field(table, key)
    if value in (PRESET, auto) and value is not False:
        return {}
    if kind is bool:
        return {key: value == "on"}
    return {key: kind(value)}


def _field(table: str, key: str) -> tuple[Any, Any]:
    owner = type(getattr(Config(), table))
    field = next(f for f in dataclasses.fields(owner) if f.name == key)
    return get_type_hints(owner)[key], field
