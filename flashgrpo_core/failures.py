"""What ended a run, in plain words: on the screen and in the run's own record."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from . import fence
from .config import Config
from .errors import FlashGRPOError, NotFinite, NoUpdate

if TYPE_CHECKING:
    from .trainer import Trainer

#: For every host: what helps when a device is full.
OUT_OF_MEMORY = (
    "the GPU is out of memory: lower rollout.micro_batch or rollout.decode_batch, or set "
    "model.gradient_checkpointing or model.offload = true, then resume; fewer frames or a smaller "
    "size need a new run"
)


def failed(trainer: Trainer, exc: Exception) -> Exception:
    """Record the failure of a run; returns the exception to raise, which may say more.

    Args:
        trainer: the run.
        exc: what was raised.
    """
    if isinstance(exc, fence.LostLease):
        return exc
    if isinstance(exc, NotFinite):
        exc = with_cause(exc, trainer.policy, trainer.config)
    with suppress(Exception):  # a full disk cannot record that it is full
        at = trainer.state.iteration
        diverged = isinstance(exc, (NotFinite, NoUpdate))
        trainer.event(
            "run_finished", at, status="failed", lora=None, reason=words(exc), diverged=diverged
        )
    return exc


def words(exc: BaseException) -> str:
    """One line that says what happened."""
    text = " ".join(str(exc).split())
    if isinstance(exc, FlashGRPOError):
        return text
    if isinstance(exc, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return f"{type(exc).__name__}: {text[:300] or 'no message'}"


def with_cause(exc: NotFinite, policy: Any, config: Config) -> NotFinite:
    """The same error, with the tensor that holds NaN and its file, or what else to do.

    Looking through all weights takes seconds, so it is done only when something is wrong.
    """
    experts = getattr(policy, "experts", {"": policy})
    for name, expert in experts.items():
        for key, tensor in expert.transformer.state_dict().items():
            if hasattr(tensor, "to_local"):  # sharded: this process looks at its own part
                tensor = tensor.to_local()
            if not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all()):
                continue
            if "lora_" in key:
                advice = "the LoRA diverged: resume from an older checkpoint with a lower optim.learning_rate"
                return NotFinite(f"{exc}; `{key}` holds NaN: {advice}")
            setting = "transformer_low" if name == "low_noise" else "transformer"
            return NotFinite(
                f"{exc}; `{key}` of model.{setting} = {getattr(config.model, setting)!r} holds NaN: "
                "the file is damaged, get it again"
            )
    dtype = config.model.dtype
    return NotFinite(
        f"{exc}; all weights are finite: set model.dtype to bf16 or fp32 (now {dtype})"
    )
