"""The text part of a forward, computed once for all videos of one prompt.

A micro-batch holds videos of one prompt, so the text's projection and the keys and values of every
cross-attention are the same in all rows. The transformer is given the distinct rows only, R of
them for B videos (1, or 2 when both halves of guidance go together), and the keys and values are
repeated where they meet the queries. Exact; at 512 text tokens it is a large part of a small video's
forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def share_context(transformer: nn.Module) -> None:
    """Let a `WanTransformer3DModel` take text `[R, tokens, dim]` for latents `[B, ...]`, R | B.

    Row r belongs to the videos `r B / R` to `(r + 1) B / R`. Call it after a LoRA was attached: the
    hooks sit on what computes keys and values then.
    """
    for block in transformer.blocks:  # type: ignore[union-attr]
        _Repeat(block.attn2)


class _Repeat:
    """Hooks of one cross-attention: the number of videos comes with the queries."""

    def __init__(self, attention: Any) -> None:
        self.videos = 0
        attention.register_forward_pre_hook(self._queries, with_kwargs=True)
        for name in ("norm_k", "to_v", "norm_added_k", "add_v_proj"):  # the last two: images
            module = getattr(attention, name, None)
            if module is not None:
                module.register_forward_hook(self._repeat)

    def _queries(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]  # [B, tokens, width]
        self.videos = len(hidden)

    def _repeat(
        self, module: nn.Module, args: tuple[Any, ...], rows: torch.Tensor
    ) -> torch.Tensor | None:
        if len(rows) == self.videos:
            return None
        # Copied, not expanded: not every attention backend takes a batch stride of 0.
        return rows.repeat_interleave(self.videos // len(rows), dim=0)
