"""The checks of node inputs, without ComfyUI: hostile values of every type."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

REPO = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    """A module of the pack that needs no ComfyUI, imported as ComfyUI imports the pack."""
    if "pack_under_test" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "pack_under_test", REPO / "__init__.py", submodule_search_locations=[str(REPO)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["pack_under_test"] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"pack_under_test.nodes.{name}")


checks = load("checks")
# The pack brings its own copy of the core, and with it its own exception class.
FlashGRPOError = checks.FlashGRPOError


@dataclass
class Widget:
    """What the checks look at in an input of a schema."""

    id: str
    kind: str
    optional: bool = False
    min: float | None = None
    max: float | None = None
    options: tuple[str, ...] = ()
    multiline: bool = False

    def get_io_type(self) -> str:
        return self.kind


class Thing:
    """A custom link type's value."""


CLASSES = {"THING": Thing}


def check(widget: Widget, value: Any) -> Any:
    return checks.check_inputs([widget], {widget.id: value}, CLASSES)[widget.id]


@given(
    st.floats() | st.integers() | st.text() | st.none() | st.booleans() | st.lists(st.integers())
)
def test_a_number_is_in_its_range_or_refused(value: Any) -> None:
    widget = Widget("strength", "FLOAT", min=-2.0, max=3.0)
    try:
        got = check(widget, value)
    except FlashGRPOError as exc:
        assert "strength" in str(exc) and "\n" not in str(exc)
    else:
        assert isinstance(got, float) and -2.0 <= got <= 3.0


@given(st.text() | st.integers() | st.none())
def test_a_choice_is_in_its_list_or_refused(value: Any) -> None:
    widget = Widget("vae", "COMBO", options=("a.safetensors", "sub/b.safetensors"))
    try:
        assert check(widget, value) in widget.options
    except FlashGRPOError as exc:
        assert "vae" in str(exc)


def test_the_other_slash_is_understood() -> None:
    widget = Widget("vae", "COMBO", options=("sub/b.safetensors",))
    assert check(widget, "sub\\b.safetensors") == "sub/b.safetensors"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("INT", 1.5),
        ("INT", True),
        ("INT", float("nan")),
        ("BOOLEAN", 1),
        ("STRING", "a\0b"),
        ("STRING", "a" * 600),
        ("STRING", "\ud800"),
        ("STRING", 7),
        ("THING", "literal"),
        ("THING", {}),
        ("LORA_MODEL", {"a": 1}),
        ("LORA_MODEL", [torch.zeros(1)]),
        ("CLIP", "clip"),
        ("LORA_MODEL,THING", 3),
    ],
)
def test_wrong_values_are_refused(kind: str, value: Any) -> None:
    with pytest.raises(FlashGRPOError, match="given"):
        check(Widget("given", kind, min=0, max=9), value)


def test_right_values_pass() -> None:
    thing, lora = Thing(), {"key": torch.zeros(1)}
    assert check(Widget("x", "LORA_MODEL,THING"), thing) is thing
    assert check(Widget("x", "LORA_MODEL,THING"), lora) is lora
    assert check(Widget("x", "INT", min=0, max=9), 3.0) == 3
    assert check(Widget("x", "STRING", multiline=True), "a" * 600) == "a" * 600


def test_missing_unknown_and_absent_inputs() -> None:
    needed, spare = Widget("needed", "THING"), Widget("spare", "THING", optional=True)
    with pytest.raises(FlashGRPOError, match="'needed' is missing"):
        checks.check_inputs([needed, spare], {}, CLASSES)
    with pytest.raises(FlashGRPOError, match="unknown input 'foreign'"):
        checks.check_inputs([needed], {"foreign": 1}, CLASSES)
    thing = Thing()
    assert checks.check_inputs([needed, spare], {"needed": thing, "spare": None}, CLASSES) == {
        "needed": thing
    }


def test_a_new_file_is_complete_and_temporary_ones_are_gone(tmp_path: Path) -> None:
    source = tmp_path / "run" / "lora.safetensors"
    source.parent.mkdir()
    source.write_bytes(b"weights")
    target = tmp_path / "loras" / "deep" / "lora.safetensors"
    checks.copy_new(source, target)
    assert target.read_bytes() == b"weights"
    assert [path.name for path in target.parent.iterdir()] == ["lora.safetensors"]
    (tmp_path / "blocked").write_bytes(b"")
    with pytest.raises(FlashGRPOError, match="cannot be written"):
        checks.copy_new(source, tmp_path / "blocked" / "lora.safetensors")
