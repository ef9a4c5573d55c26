"""What a computation holds and costs, found by running it on the meta device.

On the meta device tensors have shapes but no memory, so the real network at its real size runs in
seconds anywhere. A `Trace` follows every tensor from the operation that makes it to the moment it
is freed, what autograd keeps and what gradient checkpointing computes again included, and adds up
the floating-point operations of matrix products, convolutions and attention.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .wan.storage import StoredLinear

_aten = torch.ops.aten


class Trace:
    """Peak bytes and floating-point operations of what runs inside; use it as a context manager.

    Attributes:
        live: bytes of tensors made inside that are still there.
        peak: most that were there at once, kernels' working memory included.
        flops: floating-point operations, a multiply-add counted as two.
    """

    def __init__(self, one_memory: bool = False) -> None:
        """Start at zero.

        Args:
            one_memory: the device's memory is the host's, as on the CPU.
        """
        self.one_memory = one_memory
        self.live = 0
        self.peak = 0
        self.flops = 0.0
        self._seen: dict[int, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Trace:
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Functions(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that are there already; they are not counted."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[storage._cdata] = 0

    def forget(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor that was made inside."""
        key = tensor.untyped_storage()._cdata
        self.live -= self._seen.get(key, 0)
        self._seen[key] = 0

    def reset_peak(self) -> None:
        """Begin a new phase."""
        self.peak = self.live

    def made(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)

    def work(self, size: float) -> None:
        """Memory that a kernel needs only while it runs."""
        self.peak = max(self.peak, self.live + int(size))

    def count(self, function: Any, args: Any, out: Any) -> None:
        """Add the cost of one operation."""
        if function in (_aten.mm.default, _aten.bmm.default):
            self.flops += 2.0 * args[0].numel() * args[1].shape[-1]
        elif function is _aten.addmm.default:
            self.flops += 2.0 * args[1].numel() * args[2].shape[-1]
        elif function is _aten.convolution.default:
            self.flops += 2.0 * out.numel() * math.prod(args[1].shape[1:])
            self.work(self._convolution(args[0], args[1], out))

    def _convolution(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> float:
        """Working memory of a convolution's kernel."""
        if not self.one_memory:
            return x.nbytes + out.nbytes  # what a GPU's choose to take is not ours to know
        small = x.shape[0] == 1 and x.shape[:4].numel() <= 20480
        if not small:
            return 0.0
        # torch's own kernel for small inputs (`use_mkldnn` in its Convolution.cpp): a matrix
        # product of columns, one for each output position.
        positions = out.shape[0] * out.shape[2:].numel()
        return weight.shape[1:].numel() * positions * x.itemsize


class _Operations(TorchDispatchMode):
    """Sees every operation, those of autograd's backward pass included."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else (out,)
        for tensor in found:
            # Other tensors are in host memory, which is the device's only on the CPU.
            if isinstance(tensor, torch.Tensor) and (tensor.is_meta or self.trace.one_memory):
                self.trace.made(tensor)
        self.trace.count(function, args, found[0])
        return out


class _Functions(TorchFunctionMode):
    """Attention as a kernel that never holds the score matrix; values, which meta lacks, as ones."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is nn.functional.scaled_dot_product_attention:
            rest = [given[name] for name in ("query", "key", "value")[len(args) :]]
            query, key, value = (*args, *rest)[:3]
            return _Attention.apply(query, key, value, self.trace)
        first: Any = args[0] if args else None
        # Noise is drawn in main memory: its size counts, and large noise takes seconds to draw.
        if function is torch.randn and "generator" in given:
            return torch.empty(first)
        if function is torch.stack and first[0].dim() == 4 and not first[0].is_meta:
            return torch.empty(len(first), *first[0].shape)
        if function is torch.Tensor.backward:
            # The engine itself: what `backward` calls is handled here too, where this mode is off,
            # and checkpointed parts are computed again in there.
            engine: Any = torch.autograd.Variable._execution_engine
            with self:
                engine.run_backward(
                    (first,),
                    (torch.ones_like(first),),
                    False,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            return None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if function in _VALUES:
                return _VALUES[function]
            if function is torch.Tensor.numpy:
                return np.broadcast_to(np.zeros(1, _NUMPY[first.dtype]), tuple(first.shape))
            if function is torch.Tensor.cpu or (
                function is torch.Tensor.to and "cpu" in map(str, (*args[1:2], given.get("device")))
            ):
                return self._in_host_memory(first, bool(given.get("copy")))
        return function(*args, **given)

    def _in_host_memory(self, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
        if self.trace.one_memory:
            return tensor.clone() if copy else tensor
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.trace.forget(moved)
        return moved


_VALUES: dict[Any, Any] = {
    torch.Tensor.item: 1.0,
    torch.Tensor.__float__: 1.0,
    torch.Tensor.__bool__: True,
    torch.Tensor.__int__: 1,
}
_NUMPY = {torch.uint8: np.uint8, torch.float32: np.float32, torch.float64: np.float64}


class _Attention(torch.autograd.Function):
    """Memory of memory-efficient attention: it keeps q, k, v, the result and one fp32 a query."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, trace: Trace
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.trace = trace
        ctx.cost = 4.0 * query.numel() * key.shape[-2]
        trace.flops += ctx.cost
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.trace.flops += 2.5 * ctx.cost  # the scores are computed again
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def on_demand(network: nn.Module) -> None:
    """Let swapped layers count what they copy to the device; on meta nothing would be copied."""
    for layer in network.modules():
        if isinstance(layer, StoredLinear) and layer.swapped:
            vars(layer)["fetch"] = _copying(layer)


def _copying(layer: StoredLinear) -> Callable[[torch.device], torch.Tensor]:
    def fetch(device: torch.device) -> torch.Tensor:
        weight = layer.weight.clone()
        if layer.weight_scale is None:
            return weight.to(layer.compute)
        scale = layer.weight_scale
        return (weight.float() * (scale.reshape(-1, 1) if scale.dim() else scale)).to(layer.compute)

    return fetch
