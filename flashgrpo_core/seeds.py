"""Random numbers that depend on what they are for, never on where or when they are drawn."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts, e.g. (run seed, iteration, group id, sample, purpose).

    The parts are joined unambiguously (length-prefixed) and hashed with SHA-256, so equal parts
    give equal seeds on every machine and unequal ones practically never do.
    """
    text = "".join(f"{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded with `derive_seed(*parts)`."""
    return torch.Generator("cpu").manual_seed(derive_seed(*parts))


def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Standard normal float32 noise of `shape`, drawn on the CPU so that devices agree."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))
