"""Trained forwards whose graph is kept from the rollout until the update.

Before the first update of a rollout batch the policy is the one that sampled, so the forward of the
stochastic step and that of the train step are the same numbers. Kept, it need not be computed twice:
the gradient is the same to the last bit, and its activations stay in memory meanwhile. (Gradients
per sample, stored at once and combined with the advantages later, would need one backward pass per
video, where a group with a shared prefix needs one in all.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch

from .experts import Policy


class KeptGraphs:
    """Keeps graphs as long as their activations fit a limit; the rest is computed again later.

    Args:
        policy: its weights are not counted: they are there anyway.
        gib: limit in GiB; 0 keeps none.
    """

    def __init__(self, policy: Policy, gib: float) -> None:
        self.policy = policy
        self.limit = int(gib * 2**30)
        self._sizes: dict[Hashable, int] = {}
        self._alive: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def bytes(self) -> int:
        """What the graphs that exist now hold."""
        self._alive = [(ref, size) for ref, size in self._alive if ref() is not None]
        return sum(size for _, size in self._alive)

    def forward(self, kind: Hashable, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `compute`, with its graph if that fits.

        Args:
            kind: forwards of one kind take equal memory; the first of each is measured.
            compute: one trained forward.
        """
        size = self._sizes.get(kind)
        if self.limit == 0 or (size or 0) + self.bytes > self.limit:
            with torch.no_grad():
                return compute()
        with torch.enable_grad():
            if size is None:
                result, size = self._measured(compute)
                self._sizes[kind] = size
            else:
                result = compute()
        if size + self.bytes > self.limit:
            return result.detach()
        self._alive.append((weakref.ref(result), size))
        return result

    def _measured(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
        """The result and the bytes that autograd keeps for it."""
        weights = {
            p.untyped_storage().data_ptr()
            for expert in self.policy.experts.values()
            for p in expert.transformer.parameters()
        }
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = compute()
        return result, sum(found.values())
