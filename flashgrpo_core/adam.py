"""AdamW with its moments in fp32, or in 8 bits; and how they are written into a checkpoint.

The 8-bit optimizer is torchao's, which runs on every device: each 256 numbers of a moment share a
scale, so it suits tensors of 4096 numbers and more (smaller ones keep fp32 moments). Two of its
properties do not suit gradients of 1e-8, as they are here, and are met here:

- its scales end at 1e-12, above the squares of such gradients. Adam does not depend on the
  gradients' scale, so they are multiplied by 2^26 (exactly) on the way in;
- second moments that are small beside their neighbours round to 0, and what is left of a first
  moment would be divided by epsilon alone. So epsilon is at least 1 % of the gradients' root mean
  square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .config import OptimConfig
from .errors import FlashGRPOError

MOMENTS = ("exp_avg", "exp_avg_sq")
GRADIENT_SCALE = 2.0**26
EPS_SHARE = 0.01


class Adam:
    """AdamW on named parameters.

    Args:
        parameters: what is trained, by name.
        config: optimizer settings.

    Raises:
        FlashGRPOError: the package of the 8-bit optimizer is missing.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], config: OptimConfig) -> None:
        self.parameters = parameters
        self.config = config
        self.eight_bit = config.kind == "adamw8bit"
        settings: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        trained = list(parameters.values())
        self.torch: Any
        if self.eight_bit:
            self.torch = _eight_bit_class()(trained, **settings)
        else:
            self.torch = torch.optim.AdamW(trained, foreach=False, **settings)

    @property
    def state(self) -> Any:
        """State by parameter, as torch keeps it."""
        return self.torch.state

    def step(self, gradient: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        """One step on gradients by name, of any floating type."""
        scale = GRADIENT_SCALE if self.eight_bit else 1.0
        for name, parameter in self.parameters.items():
            # A host may have moved the network since the moments were made or restored.
            for key, value in self.state.get(parameter, {}).items():
                if torch.is_tensor(value) and value.dim() > 0 and value.device != parameter.device:
                    self.state[parameter][key] = value.to(parameter.device)
            parameter.grad = (gradient[name] * scale).to(parameter.device, parameter.dtype)
        for group in self.torch.param_groups:
            if self.eight_bit:
                group["lr"].fill_(learning_rate)
                group["eps"] = self._epsilon(gradient) * scale
            else:
                group["lr"] = learning_rate
        if self.eight_bit:
            # The package compiles its step, for which many machines lack a compiler.
            with torch.compiler.set_stance("force_eager"):
                self.torch.step()
        else:
            self.torch.step()
        self.torch.zero_grad(set_to_none=True)

    def _epsilon(self, gradient: Mapping[str, torch.Tensor]) -> float:
        squares = sum(float(g.square().sum()) for g in gradient.values())
        count = sum(g.numel() for g in gradient.values())
        return max(self.config.eps, EPS_SHARE * math.sqrt(squares / count))

    def moments(self) -> dict[str, torch.Tensor]:
        """The moments as named tensors (CPU copies): `<name>.exp_avg`, in 8 bits `.codes`, `.scale`."""
        tensors = {}
        for name, parameter in self.parameters.items():
            for key in MOMENTS:
                value = self.state.get(parameter, {}).get(key)
                if value is not None:
                    for part, tensor in _parts(value).items():
                        tensors[f"{name}.{key}{part}"] = tensor.detach().to("cpu", copy=True)
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Set the moments from `moments`-style tensors, and the number of steps taken.

        Raises:
            FlashGRPOError: they were written by the other kind of optimizer.
        """
        self.state.clear()
        if steps == 0:
            return
        for name, parameter in self.parameters.items():
            self.state[parameter] = {"step": torch.tensor(float(steps))}
            for key in MOMENTS:
                if self.eight_bit:
                    value = self.torch._new_buffer(parameter, key == "exp_avg")
                else:
                    value = torch.zeros_like(parameter)
                for part, tensor in _parts(value).items():
                    saved = tensors.get(f"{name}.{key}{part}")
                    if saved is None:
                        raise FlashGRPOError(
                            f"optim.kind = {self.config.kind!r}, but the checkpoint holds the "
                            "moments of the other kind: resume with the kind that it was made with"
                        )
                    tensor.copy_(saved)
                self.state[parameter][key] = value


def _parts(moment: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors of a moment by name ending."""
    eight_bit: Any = moment
    if not hasattr(moment, "codes"):
        return {"": moment}
    return {".codes": eight_bit.codes, ".scale": eight_bit.scale}


def check_installed(config: OptimConfig) -> None:
    """Check that the configured optimizer can be made.

    Raises:
        FlashGRPOError: its package is missing.
    """
    if config.kind == "adamw8bit":
        _eight_bit_class()


def _eight_bit_class() -> Any:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as exc:
        raise FlashGRPOError(
            "optim.kind = 'adamw8bit' needs the package torchao: pip install torchao, or use adamw"
        ) from exc
    return AdamW8bit
