"""Curves for TensorBoard and Weights & Biases, through accelerate's trackers.

Everything they show is in `events.jsonl` as well; they are one more reader of the same records. W&B
runs offline: it writes into the run folder, and uploading that (`wandb sync`) is left to the user.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import FlashGRPOError

#: Numbers of an `iteration` event that make a curve.
_CURVES = (
    "advantage_std",
    "clip_fraction",
    "forwards_total",
    "grad_norm",
    "kl",
    "loss",
    "lr",
    "masked",
    "peak_memory",
    "ratio_drift",
    "seconds",
    "zero_variance_groups",
)


class Trackers:
    """The trackers of one run; only the main process has them.

    Args:
        names: `tensorboard`, `wandb`.
        folder: the run folder, whose name is the run's.
        settings: configuration, nested tables.
        iteration: iterations done; what was logged behind it before a resume is taken back.

    Raises:
        FlashGRPOError: a tracker is not installed.
    """

    def __init__(
        self, names: list[str], folder: Path, settings: Mapping[str, Any], iteration: int
    ) -> None:
        self._trackers = []
        for name in names:
            try:
                tracker = _open(name, folder, settings, iteration)
            except ImportError as exc:
                raise FlashGRPOError(
                    f"run.trackers names {name!r}, which is not installed ({exc}): "
                    "pip install 'flashgrpo[trackers]'"
                ) from None
            self._trackers.append(tracker)

    def log(self, record: Mapping[str, Any]) -> None:
        """Take in one event; those without curves are left out."""
        values = curves(record)
        for tracker in self._trackers if values else ():
            tracker.log(values, step=int(record["iteration"]))

    def close(self) -> None:
        """Write what is left."""
        for tracker in self._trackers:
            tracker.finish()


def _open(name: str, folder: Path, settings: Mapping[str, Any], iteration: int) -> Any:
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    if name == "tensorboard":
        import tensorboard  # noqa: F401  the writer's own error names another package

        tracker = TensorBoardTracker(
            folder.name, logging_dir=folder / "tensorboard", purge_step=iteration + 1
        )
    else:
        import wandb

        tracker = WandBTracker(
            "flashgrpo",
            name=folder.name,
            dir=str(folder),
            mode="offline",
            config=dict(settings),
            settings=wandb.Settings(console="off", silent=True),
        )
    start = getattr(tracker, "start", None)  # older versions start when they are made
    if start is not None:
        start()
    return tracker


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event, by the name of their curve; not finite ones are left out."""
    kind = record.get("event")
    values: dict[str, Any] = {}
    if kind == "iteration":
        reward = record.get("reward") or {}
        values = {key: record.get(key) for key in _CURVES}
        values |= {f"reward/{key}": reward.get(key) for key in ("mean", "std")}
        values |= {f"reward/term/{k}": v for k, v in (reward.get("terms") or {}).items()}
    elif kind == "evaluation":
        split = record.get("split")
        for key in ("reward_mean", "baseline_mean", "difference", "ci_low", "ci_high"):
            values[f"{split}/{key}"] = record.get(key)
    elif kind == "phase":
        values = {f"phase/{record.get('name')}": record.get("seconds")}
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
