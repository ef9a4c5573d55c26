"""The optimiser: Muon for matrices, Adam for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def _orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """Move all singular values of a matrix near 1 (five Newton-Schulz steps)."""
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class MuonAdam:
    """Momentum with orthogonalised updates for weight matrices and kernels, Adam for the rest.

    Small convolution stacks behind RMS norms learn in far fewer steps this way than with Adam
    alone, and CPU steps are what the script has least of. Kernels count as matrices
    [out, in * taps]. The learning rate follows a short warm-up and a cosine to zero.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        steps: int,
        lr: float = 0.02,
        adam_lr: float = 3e-3,
        adam_only: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        every = [p for p in parameters if p.requires_grad]
        plain = {id(p) for p in adam_only}
        self.matrices = [
            p for p in every if p.ndim >= 2 and min(p[0].numel(), len(p)) > 1 and id(p) not in plain
        ]
        chosen = {id(p) for p in self.matrices}
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.adam = torch.optim.Adam(
            [p for p in every if id(p) not in chosen], lr=adam_lr, betas=(0.9, 0.98)
        )
        self.steps, self.lr, self.adam_lr, self.step_index = steps, lr, adam_lr, 0

    @torch.no_grad()
    def step(self) -> None:
        """Apply one update and clear the gradients."""
        at = self.step_index / self.steps
        factor = min(1.0, (self.step_index + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * at))
        self.step_index += 1
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        self.adam.zero_grad()
        for p, momentum in zip(self.matrices, self.momenta, strict=True):
            if p.grad is None:
                continue
            momentum.mul_(0.95).add_(p.grad)
            update = _orthogonalise((p.grad + 0.95 * momentum).flatten(1))
            scale = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
            p.add_(update.view_as(p), alpha=-self.lr * factor * scale)
            p.grad = None
