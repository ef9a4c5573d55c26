"""How a host (command line, ComfyUI, worker) watches and stops the core.

The core calls one object at its natural boundaries: before each transformer forward, backward,
decode chunk and reward call (`check`), after each unit of progress (`tick`) and before it needs a
network on the device (`bring`). This base class is the quiet host: no bar, no cancel, everything
already where it should be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn


class Control:
    """A host that shows nothing, never cancels and leaves networks where they are.

    Attributes:
        device: where a host that moves networks itself computes; None for others, whose networks
            are loaded where they run.
    """

    device: torch.device | None = None

    def phase(self, name: str, total: int, iteration: int = 0) -> None:
        """Start a phase (`encode`, `rollout`, `decode`, `score`, `update`, `evaluate`, `save`).

        Args:
            name: phase name, as it appears in `events.jsonl`.
            total: number of `tick` units that will follow.
            iteration: current iteration, 0 before the first.
        """

    def tick(self, done: int = 1) -> None:
        """Report `done` more units of the current phase."""

    def check(self) -> None:
        """Raise `Cancelled` (or the host's own exception) when the user asked to stop."""

    def bring(self, network: nn.Module) -> None:
        """Make `network` resident on its compute device; others may be moved away."""
        home = getattr(network, "home", None)  # of networks that were loaded elsewhere
        if home is not None:
            network.to(home)

    def preview(self, video: np.ndarray, caption: str) -> None:
        """Show one decoded video, uint8 `[T, H, W, 3]`."""

    def finish(self) -> bool:
        """Whether to end the run well after this iteration: judge, export, return the LoRA."""
        return False

    def event(self, record: dict[str, Any]) -> None:
        """See one record that was just appended to `events.jsonl`."""
