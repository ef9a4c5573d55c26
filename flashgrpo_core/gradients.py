"""Sums of LoRA gradients, in float64 so that their order does not matter."""

from __future__ import annotations

import math

import torch

from .distributed import World
from .experts import Policy
from .signals import SKETCH, Sketcher


class GradientSum:
    """Adds up the gradients of backward passes, by parameter name.

    Args:
        policy: the policy; gradients left over from an interrupted pass are dropped.
        sketcher: makes `sketch`, the sketch of what the last `take` has taken, `[SKETCH]`.
    """

    def __init__(self, policy: Policy, sketcher: Sketcher | None = None) -> None:
        self.sketcher = sketcher
        self.sketch = torch.zeros(SKETCH, dtype=torch.float64)
        self.parameters = policy.parameters()
        for parameter in self.parameters.values():
            parameter.grad = None  # left over when a backward pass ran out of memory
        cpu = policy.device.type == "mps"  # no float64 on MPS
        self.where = torch.device("cpu") if cpu else policy.device
        self.sums = {
            name: torch.zeros(p.shape, dtype=torch.float64, device=self.where)
            for name, p in self.parameters.items()
        }

    def take(self) -> float:
        """Move what the last backward pass left into the sum; returns its norm."""
        squared = 0.0
        self.sketch = torch.zeros(SKETCH, dtype=torch.float64, device=self.where)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                part = parameter.grad.to(self.where, torch.float64)
                self.sums[name] += part
                squared += float(part.square().sum())
                if self.sketcher is not None:
                    self.sketcher.add(self.sketch, name, part)
                parameter.grad = None
        return math.sqrt(squared)

    def total(self, world: World) -> dict[str, torch.Tensor]:
        """The sum over all ranks, in one exchange."""
        if world.size > 1:
            flat = world.sum_(torch.cat([g.flatten() for g in self.sums.values()]))
            pieces = flat.split([g.numel() for g in self.sums.values()])
            return {n: p.view_as(self.sums[n]) for n, p in zip(self.sums, pieces, strict=True)}
        return self.sums
