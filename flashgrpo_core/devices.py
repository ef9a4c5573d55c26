"""Compute devices by name."""

from __future__ import annotations

import torch

from .errors import FlashGRPOError


def pick_device(name: str, setting: str = "model.device") -> torch.device:
    """The device of a setting; `auto` is the fastest one there is.

    Args:
        name: `auto`, or a name that torch knows: `cpu`, `cuda:1`, `mps`.
        setting: what the user would change, for the message.

    Raises:
        FlashGRPOError: the device does not exist here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    # What torch raises for an unknown name, a build without the back end, and an absent device.
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise FlashGRPOError(
            f"{setting} = {name!r} is not available ({reason}): use auto or cpu"
        ) from None
    return device
