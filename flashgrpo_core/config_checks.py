"""Settings of the method that do not go together."""

from __future__ import annotations

from .config import Config
from .errors import FlashGRPOError


def check_method(config: Config) -> None:
    """Check that algorithm, strategy, draw and advantages fit each other.

    Raises:
        FlashGRPOError: naming the setting, the value and the fix.
    """
    if config.loss.algorithm == "nft" and config.rollout.noise != "independent":
        raise FlashGRPOError(
            "loss.algorithm = 'nft' samples without a stochastic step, so videos that share their "
            "initial noise would be equal: set rollout.noise = 'independent'"
        )
    if config.loss.algorithm == "nft" and config.schedule.strategy != "flash":
        raise FlashGRPOError(
            f"schedule.strategy = {config.schedule.strategy!r} is for loss.algorithm = 'grpo': nft has "
            "no stochastic steps, leave schedule.strategy out"
        )
    s = config.schedule
    if s.strategy == "window" and s.train_steps == 1 and s.place != "random":
        raise FlashGRPOError(
            f"schedule.train_steps = 1 with schedule.place = {s.place!r} trains a single noise level "
            "per update, which collapses: use at least 2 steps, or place = 'random'"
        )
    if config.loss.freeze_std and config.loss.advantage_std in ("group", "none"):
        raise FlashGRPOError(
            f"loss.freeze_std needs one std for all groups, not loss.advantage_std = "
            f"{config.loss.advantage_std!r}: use update"
        )
    if config.schedule.adaptive:
        if config.schedule.strategy != "flash" or config.loss.algorithm != "grpo":
            raise FlashGRPOError(
                "schedule.adaptive draws the one step of schedule.strategy = 'flash' with "
                "loss.algorithm = 'grpo': use these, or set schedule.adaptive = false"
            )
        if not config.loss.freeze_std and config.loss.advantage_std != "none":
            raise FlashGRPOError(
                "schedule.adaptive is unbiased only if advantages are not divided by a std of the same "
                "update: set loss.freeze_std = true, or loss.advantage_std = 'none'"
            )
        if config.loss.rectification == "update":
            raise FlashGRPOError(
                "schedule.adaptive is unbiased only if the weights do not depend on the update: set "
                "loss.rectification = 'pool'"
            )
    if config.loss.kl_on_drop > 0 and config.eval.every == 0:
        raise FlashGRPOError(
            "loss.kl_on_drop waits for validation evaluations: set eval.every above 0"
        )
