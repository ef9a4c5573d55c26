"""Selective gradient checkpointing: which blocks recompute their activations."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import FlashGRPOError


def checkpoint_blocks(transformer: Any, blocks_to_keep: int = 0) -> None:
    """Recompute the activations of a transformer's blocks in the backward pass, but of the last.

    The last blocks are those to keep: the backward pass starts with them, so what they kept is
    free again when the first block is recomputed, and both do not add up.

    Args:
        transformer: a `WanTransformer3DModel`.
        blocks_to_keep: number of blocks, from the last, whose activations are kept.

    Raises:
        FlashGRPOError: more blocks than there are.
    """
    blocks = list(transformer.blocks)
    if not 0 <= blocks_to_keep <= len(blocks):
        raise FlashGRPOError(
            f"model.blocks_to_keep = {blocks_to_keep}, but this model has {len(blocks)} blocks: "
            f"use 0 to {len(blocks)}"
        )
    kept = set(blocks[len(blocks) - blocks_to_keep :])

    def run(block: nn.Module, *inputs: Any) -> Any:
        if block in kept:
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=False)

    transformer.enable_gradient_checkpointing(run)
