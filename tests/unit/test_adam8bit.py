"""AdamW with moments in 8 bits: near AdamW, restored bit for bit, missing package named.

The package is no dependency. Where it is missing, `test_adam8bit_package.py` installs it into a
folder of its own and runs this file again.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

from flashgrpo_core.adam import Adam
from flashgrpo_core.config import OptimConfig
from flashgrpo_core.errors import FlashGRPOError

needs_package = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
SHAPES = {"large.lora_A": (16, 512), "large.lora_B": (512, 16), "small.lora_A": (4, 32)}


def parameters() -> dict[str, torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(s, generator=draw)) for n, s in SHAPES.items()}


def gradient(step: int, scale: float) -> dict[str, torch.Tensor]:
    """Gradients of a size that differs by four orders of magnitude between neighbours."""
    draw = torch.Generator().manual_seed(step)
    return {
        n: scale
        * torch.randn(s, generator=draw, dtype=torch.float64)
        * 10 ** (-4 * torch.rand(s, generator=draw, dtype=torch.float64))
        for n, s in SHAPES.items()
    }


def config(kind: str) -> OptimConfig:
    return OptimConfig(learning_rate=1e-3, weight_decay=0.0, kind=kind)


@needs_package
@pytest.mark.parametrize("scale", [1e-8, 1e-3])
def test_steps_are_near_those_of_adamw(scale: float) -> None:
    """Also for gradients of 1e-8, whose squares lie below the package's smallest scale."""
    moved = {}
    for kind in ("adamw", "adamw8bit"):
        trained = parameters()
        adam = Adam(trained, config(kind))
        for step in range(10):
            adam.step(gradient(step, scale), 1e-3)
        start = parameters()
        moved[kind] = {n: (p - start[n]).detach() for n, p in trained.items()}
    for name, exact in moved["adamw"].items():
        near = moved["adamw8bit"][name]
        assert near.abs().max() <= 1.5 * exact.abs().max(), "no step may explode"
        assert float((near * exact).sum() / near.norm() / exact.norm()) >= 0.9, name


@needs_package
def test_moments_take_a_quarter_of_the_memory_and_are_restored_bit_for_bit() -> None:
    trained = parameters()
    adam = Adam(trained, config("adamw8bit"))
    for step in range(3):
        adam.step(gradient(step, 1e-8), 1e-3)
    saved = adam.moments()
    large = [t for n, t in saved.items() if n.startswith("large.")]
    assert {t.dtype for t in large} == {torch.uint8, torch.float32}
    assert sum(t.nbytes for t in large) <= 0.26 * 2 * 2 * 16 * 512 * 4
    other = {n: torch.nn.Parameter(p.detach().clone()) for n, p in trained.items()}
    restored = Adam(other, config("adamw8bit"))
    restored.restore(saved, 3)
    for step in range(3, 6):
        adam.step(gradient(step, 1e-8), 1e-3)
        restored.step(gradient(step, 1e-8), 1e-3)
    assert all(torch.equal(trained[n], other[n]) for n in SHAPES)
    again = restored.moments()
    assert all(torch.equal(t, again[n]) for n, t in adam.moments().items())
    with pytest.raises(FlashGRPOError, match="optim.kind = 'adamw'.*moments of the other kind"):
        Adam(parameters(), config("adamw")).restore(saved, 3)


def test_fp32_moments_do_not_go_into_8_bits() -> None:
    trained = parameters()
    adam = Adam(trained, config("adamw"))
    adam.step(gradient(0, 1e-8), 1e-3)
    saved = adam.moments()
    assert {t.dtype for t in saved.values()} == {torch.float32}
    del saved["large.lora_A.exp_avg"]
    with pytest.raises(FlashGRPOError, match="moments of the other kind"):
        Adam(parameters(), config("adamw")).restore(saved, 1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(FlashGRPOError, match="needs the package torchao: pip install torchao"):
        Adam(parameters(), config("adamw8bit"))
