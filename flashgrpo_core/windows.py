"""Which sampling steps may be stochastic, and for which expert."""

from __future__ import annotations

import os
from functools import lru_cache

from .config import Config
from .config_io import flow_shift, sde_window
from .errors import FlashGRPOError
from .experts import BOUNDARY_I2V, BOUNDARY_T2V, HIGH, LOW, switch_step
from .files import open_tensors
from .schedule import Schedule, make_schedule
from .wan.detect import detect_transformer

Window = tuple[int, int]


def trained_experts(config: Config) -> list[str]:
    """Names of the networks that get a LoRA: `[""]` for a model without experts."""
    if not config.model.transformer_low:
        return [""]
    chosen = config.model.train_experts
    return [HIGH, LOW] if chosen == "both" else [chosen]


def expert_boundary(config: Config) -> float:
    """Sigma at which the low-noise expert takes over.

    Raises:
        FlashGRPOError: it is not set and the model file cannot be read.
    """
    if config.model.boundary > 0:
        return config.model.boundary
    path = config.model.transformer
    if os.path.isfile(path):
        return _usual_boundary(path, os.stat(path).st_mtime_ns)
    return _usual_boundary.__wrapped__(path, 0)


@lru_cache(maxsize=8)
def _usual_boundary(path: str, mtime: int) -> float:
    spec = detect_transformer(open_tensors(path))
    return BOUNDARY_T2V if spec.in_channels == spec.out_channels else BOUNDARY_I2V


def sde_windows(config: Config) -> dict[str, Window]:
    """The half-open window of SDE steps of each trained expert, `{"": window}` without experts.

    With experts the high-noise one has all its steps by default, which lie in the first half of
    common schedules, and the low-noise one the first half of its own. A configured window is cut
    at the switch. The last step of the schedule is never stochastic.

    Raises:
        FlashGRPOError: an expert would be left with fewer than two steps.
    """
    if not config.model.transformer_low:
        return {"": sde_window(config)}
    schedule = _schedule(config)
    boundary = expert_boundary(config)
    switch, last = switch_step(schedule, boundary), schedule.steps - 1
    windows = {
        HIGH: (0, min(switch, last)),
        LOW: (switch, min(switch + max(2, (schedule.steps - switch) // 2), last)),
    }
    if config.schedule.window:
        first, end = sde_window(config)
        windows = {
            HIGH: (first, min(end, switch)),
            LOW: (max(first, switch), end),
        }
    chosen = {name: windows[name] for name in trained_experts(config)}
    for name, (first, end) in chosen.items():
        if end - first < 2:
            raise FlashGRPOError(
                f"the {name} expert has {max(end - first, 0)} eligible SDE step(s): with shift "
                f"{schedule.shift:g} the experts change at step {switch} of {schedule.steps} "
                f"(sigma below {boundary:g}); use more steps, another schedule.window, or set "
                f"model.train_experts to the other expert"
            )
    return chosen


def _schedule(config: Config) -> Schedule:
    return make_schedule(config.schedule.kind, config.schedule.steps, flow_shift(config))
