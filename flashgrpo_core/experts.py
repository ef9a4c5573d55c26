"""Two experts as one policy: Wan 2.2 A14B denoises first with a high-noise, then a low-noise model.

The switch is where the schedule's sigma, which is the shifted one, falls below the boundary. Names
of trained tensors carry the expert in front (`high_noise.blocks.0...`), so that checkpoints, moving
average and optimizer hold both without knowing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from .errors import FlashGRPOError
from .policy import WanPolicy
from .schedule import Schedule
from .seeds import derive_seed

HIGH, LOW = "high_noise", "low_noise"

#: Boundaries of the published models, on sigma.
BOUNDARY_T2V, BOUNDARY_I2V = 0.875, 0.9


def switch_step(schedule: Schedule, boundary: float) -> int:
    """First step of the low-noise expert: the first whose float32 sigma is below the boundary.

    float32 is what samplers compare in, so a sigma that is equal on paper goes the same way.
    """
    below = schedule.sigmas.astype(np.float32) < np.float32(boundary)
    return int(np.argmax(below))  # the last sigma is 0, so there is one


class TwoExperts:
    """The policy of a model with two experts; used like a `WanPolicy`.

    Args:
        high: expert of the first, noisy steps.
        low: expert of the rest.
        boundary: sigma at which they change.
    """

    def __init__(self, high: WanPolicy, low: WanPolicy, boundary: float) -> None:
        self.experts = {HIGH: high, LOW: low}
        self.boundary = boundary
        self.rank, self.alpha = high.rank, high.alpha

    @property
    def trained(self) -> dict[str, WanPolicy]:
        """The experts that have a LoRA."""
        return {name: expert for name, expert in self.experts.items() if expert.trained}

    @property
    def targets(self) -> list[str]:
        """Modules with a LoRA, the expert's name in front."""
        return [f"{n}.{target}" for n, expert in self.trained.items() for target in expert.targets]

    @property
    def device(self) -> torch.device:
        """Where latents go: the device of the expert that is there."""
        return max((e.device for e in self.experts.values()), key=lambda d: d.type != "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Compute type of the frozen weights."""
        return self.experts[HIGH].dtype

    def stages(self, schedule: Schedule) -> list[tuple[WanPolicy, range]]:
        """Who computes which sampling steps, in order; an expert without steps is left out."""
        switch = switch_step(schedule, self.boundary)
        parts = [(HIGH, range(switch)), (LOW, range(switch, schedule.steps))]
        return [(self.experts[name], steps) for name, steps in parts if steps]

    def initialise(self, seed: int) -> None:
        """Set the LoRAs to their start, each from its own draw."""
        self.experts[HIGH].initialise(seed)
        self.experts[LOW].initialise(derive_seed(seed, LOW))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained tensors of both experts by name."""
        return {
            f"{name}.{key}": parameter
            for name, expert in self.trained.items()
            for key, parameter in expert.parameters().items()
        }

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of the trained tensors on the CPU, by name."""
        return {
            f"{name}.{key}": tensor
            for name, expert in self.trained.items()
            for key, tensor in expert.snapshot().items()
        }

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the trained tensors of both experts.

        Raises:
            FlashGRPOError: weights of an expert that is not trained here, or that do not fit.
        """
        odd = [key for key in weights if key.partition(".")[0] not in self.trained]
        if odd:
            raise FlashGRPOError(
                f"adapter tensor {odd[0]} belongs to no trained expert "
                f"({', '.join(self.trained)}): use the same model.train_experts"
            )
        for name, expert in self.trained.items():
            expert.load(expert_weights(weights, name))

    @contextmanager
    def using(self, weights: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
        """Run with other adapter weights, then restore the live ones."""
        with ExitStack() as stack:
            for name, expert in self.trained.items():
                own = None if weights is None else expert_weights(weights, name)
                stack.enter_context(expert.using(own))
            yield

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Run as the reference policy, both experts."""
        with ExitStack() as stack:
            for expert in self.trained.values():
                stack.enter_context(expert.reference())
            yield


#: What samples and is trained: one network, or two.
Policy = WanPolicy | TwoExperts


def expert_weights(weights: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The tensors of one expert under their names without it; all of them when `name` is empty."""
    if not name:
        return dict(weights)
    return {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in weights.items()
        if key.startswith(f"{name}.")
    }


def expert_names(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """The experts that `snapshot`-style tensors belong to: `[""]` for a model without experts."""
    found = [name for name in (HIGH, LOW) if any(key.startswith(f"{name}.") for key in weights)]
    return found or [""]
