"""Frozen linear layers whose weight rests in another form, or elsewhere, than it computes in.

Two savings, one mechanism. In 8-bit storage a weight stays the 8-bit tensor of its file and becomes
a 16-bit one only while its layer computes. A swapped weight rests in host memory and is copied to
the device only while its layer computes. Both forward and backward fetch the weight anew and
nothing of it is kept in the graph, so gradient checkpointing, which runs a block's forward twice,
sees the same numbers each time. (Hooks that move whole blocks do not guarantee that: the
recomputed block may meet weights that were already moved away.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import FlashGRPOError

if TYPE_CHECKING:
    from .weights import Weights

STORAGES = ("full", "fp8")
#: Largest finite value of `float8_e4m3fn`.
E4M3_MAX = 448.0
EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


class StoredLinear(nn.Linear):
    """A frozen linear layer with a stored weight.

    Args:
        weight: `[out, in]`, fp8, int8 or any floating type.
        bias: `[out]` in the compute type, or None.
        compute: type the layer computes in.
        scale: fp32, scalar or `[out]`; the weight is `weight * scale`. None means 1.
        swapped: the weight stays in host memory when the layer moves to another device.
    """

    weight_scale: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        compute: torch.dtype,
        scale: torch.Tensor | None = None,
        swapped: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.compute = compute
        self.swapped = swapped
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
        self.register_buffer("weight_scale", scale)
        #: Frozen LoRAs on this layer: (A `[r, in]`, B `[out, r]`, scale folded into B).
        self.low_rank: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fetch(self, device: torch.device) -> torch.Tensor:
        """The weight `[out, in]` in the compute type on `device`, dequantised in fp32."""
        weight = self.weight.to(device, non_blocking=True)
        if self.weight_scale is None:
            return weight.to(self.compute)
        scale = self.weight_scale.to(device)
        return (weight.float() * (scale.reshape(-1, 1) if scale.dim() else scale)).to(self.compute)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T + b`, x `[..., in]` -> `[..., out]`."""
        out = _FetchedLinear.apply(x, self)
        for a, b in self.low_rank:
            out = out + F.linear(F.linear(x, a.to(x)), b.to(x))
        return out

    def add_low_rank(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the product `b a` to the weight without touching the stored tensor.

        Adding it to an 8-bit weight would round most of it away.

        Args:
            a: `[r, in]`.
            b: `[out, r]`, with the LoRA's scale and strength folded in.
        """
        self.low_rank.append((a.to(self.compute), b.to(self.compute)))

    def add(self, delta: torch.Tensor) -> None:
        """Add a full-rank change `[out, in]`; the layer is then stored in its compute type."""
        weight = self.fetch(self.weight.device).float() + delta.to(self.weight.device)
        self.weight = nn.Parameter(weight.to(self.compute), requires_grad=False)
        self.weight_scale = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> StoredLinear:
        self.low_rank = [(fn(a), fn(b)) for a, b in self.low_rank]
        if not self.swapped:
            super()._apply(fn, recurse)
            return self
        kept = self._parameters.pop("weight"), self._buffers.pop("weight_scale")
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"], self._buffers["weight_scale"] = kept
        return self

    def extra_repr(self) -> str:
        """Sizes and storage, for `print(model)`."""
        rest = "host" if self.swapped else "device"
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype} on {rest}, computes {self.compute}"


class _FetchedLinear(torch.autograd.Function):
    """`F.linear` that keeps no weight for the backward pass but fetches it again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: StoredLinear) -> torch.Tensor:
        ctx.layer = layer
        return F.linear(x, layer.fetch(x.device), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.fetch(grad.device).to(grad.dtype), None


def resident_bytes(network: nn.Module) -> int:
    """Bytes of weights and buffers that lie on the device with a network: all but swapped ones."""
    swapped = [m for m in network.modules() if isinstance(m, StoredLinear) and m.swapped]
    apart = {id(t) for m in swapped for t in (m.weight, m.weight_scale)}
    every = (*network.parameters(), *network.buffers())
    return sum(t.nbytes for t in every if id(t) not in apart)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight `[out, in]` to 8 bits, each output row with its own scale.

    Returns:
        `float8_e4m3fn` `[out, in]` and fp32 scales `[out]`.
    """
    weight = weight.float()
    largest = weight.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    return (weight / scale[:, None]).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class _Store:
    eight_bit: bool
    swapped: bool


def stored_keys(
    keys: Iterable[str], blocks: int, storage: str = "full", blocks_to_swap: int = 0
) -> dict[str, _Store]:
    """Which weights get a `StoredLinear`, and how: those of the linear layers of the blocks.

    They hold nearly all parameters, while embedders, norms and modulation are small and sensitive.

    Args:
        keys: keys of the diffusers model.
        blocks: number of blocks.
        storage: `full` or `fp8`.
        blocks_to_swap: number of blocks, from the last, whose weights rest in host memory.

    Raises:
        FlashGRPOError: an unknown storage, or more blocks than there are.
    """
    if storage not in STORAGES:
        raise FlashGRPOError(f"model.storage {storage!r} is unknown: use {' or '.join(STORAGES)}")
    if not 0 <= blocks_to_swap <= blocks:
        raise FlashGRPOError(
            f"model.blocks_to_swap = {blocks_to_swap}, but this model has {blocks} blocks: "
            f"use 0 to {blocks}"
        )
    found = {}
    for key in keys:
        parts = key.split(".")
        linear = parts[-1] == "weight" and len(parts) > 3 and parts[2] in ("attn1", "attn2", "ffn")
        if parts[0] != "blocks" or not linear or parts[3].startswith("norm"):
            continue
        store = _Store(storage == "fp8", int(parts[1]) >= blocks - blocks_to_swap)
        if store.eight_bit or store.swapped:
            found[key] = store
    return found


@torch.no_grad()
def store_blocks(
    model: nn.Module,
    weights: Weights,
    names: Mapping[str, str],
    stored: Mapping[str, _Store],
    compute: torch.dtype,
    device: torch.device | str,
) -> None:
    """Replace linear layers by `StoredLinear` ones with their weights from the checkpoint.

    Args:
        model: its other weights are set already (biases too).
        weights: the checkpoint.
        names: model key -> weight name.
        stored: see `stored_keys`.
        compute: type the layers compute in.
        device: where weights that are not swapped rest.
    """
    for key, store in stored.items():
        scale: torch.Tensor | None = None
        if store.eight_bit:
            weight, scale = weights.raw(names[key])
            if weight.dtype not in EIGHT_BIT:
                weight, scale = quantise(weight)
        else:
            weight = weights.get(names[key], compute)
        if not store.swapped:
            weight = weight.to(device)
            scale = None if scale is None else scale.to(device)
        elif torch.cuda.is_available():
            weight = weight.pin_memory()  # copies to the device at full speed
        owner, _, leaf = key.removesuffix(".weight").rpartition(".")
        parent = model.get_submodule(owner)
        old = getattr(parent, leaf)
        layer = StoredLinear(weight, old.bias, compute, scale, store.swapped)
        setattr(parent, leaf, layer.eval())
