"""How fast this device multiplies matrices."""

from __future__ import annotations

import time

import torch

_SECONDS = 0.3


def measured_rate(device: torch.device, dtype: str = "auto") -> float:
    """Floating-point operations per second of matrix products of a transformer's shape.

    Args:
        device: where to measure; it must be there.
        dtype: as `model.dtype`; `auto` is bf16 on a GPU, fp32 on the CPU.
    """
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    compute = types.get(dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
    rows, width = (256, 1024) if device.type == "cpu" else (4096, 4096)
    a = torch.ones(rows, width, dtype=compute, device=device)
    b = torch.ones(width, width, dtype=compute, device=device)
    (a @ b).sum().item()
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < _SECONDS:
        for _ in range(4):
            c = a @ b
        c.sum().item()  # waits for the device
        done += 4
    return done * 2.0 * rows * width * width / (time.perf_counter() - started)
