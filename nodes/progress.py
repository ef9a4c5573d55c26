"""What the user sees while the core works: bar, preview, text below the node, and Cancel."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..flashgrpo_core.config import Config
from ..flashgrpo_core.control import Control
from ..flashgrpo_core.errors import Cancelled
from ..flashgrpo_core.video import filmstrip
from . import host

log = logging.getLogger(__name__)

#: Runs that train in this process right now.
training: dict[str, TrainControl] = {}

_WORDS = {
    "encode": "encoding prompts",
    "rollout": "sampling videos",
    "decode": "decoding videos",
    "score": "scoring videos",
    "update": "updating the LoRA",
    "evaluate": "judging on held-out prompts",
    "save": "saving",
    "wait": "waiting for a worker",
}


class HostControl(Control):
    """Shows phases as ComfyUI's progress bar and listens to Cancel.

    It sends no live previews: the frontends show a node's last preview in place of the picture or
    video that it returns, and nothing takes it back.

    The core is told with its own `Cancelled`, so that it can put a run in order; the wrapper around
    every node hands ComfyUI the exception it expects.

    Args:
        bring: makes a network resident.
    """

    def __init__(self, bring: Callable[[nn.Module], None]) -> None:
        self._bring = bring
        self.device = host.compute_device()
        self._bar: Any = None
        self._started = 0.0
        self.name = "load"
        self.done = self.total = 0
        self.strip: Any = None
        self.strip_time = 0.0

    def phase(self, name: str, total: int, iteration: int = 0) -> None:
        """Start a bar."""
        self.name = host.running.phase = name
        self.done, self.total, self._started = 0, max(total, 1), time.monotonic()
        self._bar = host.progress_bar(self.total)
        host.show_text(self.status())

    def tick(self, done: int = 1) -> None:
        """Move the bar, with the newest preview."""
        self.done = min(self.done + done, self.total)
        if self._bar is not None:
            preview = None if self.strip is None else ("JPEG", self.strip, 1024)
            self._listen(lambda: self._bar.update_absolute(self.done, self.total, preview))
        host.show_text(self.status())

    def check(self) -> None:
        """Stop here when the user pressed Cancel."""
        self._listen(host.check_interrupt)

    def bring(self, network: nn.Module) -> None:
        """Make a network resident."""
        self._bring(network)

    def status(self) -> str:
        """The text below the node."""
        words = _WORDS.get(self.name, self.name)
        if not self.done:
            return words
        left = (time.monotonic() - self._started) / self.done * (self.total - self.done)
        return f"{words} {self.done}/{self.total}, {duration(left)} left"

    def _listen(self, action: Callable[[], None]) -> None:
        try:
            action()
        except host.Interrupted:
            cancelled = True
        else:
            cancelled = False
        if cancelled:
            raise Cancelled("cancelled in ComfyUI")


class TrainControl(HostControl):
    """Follows a whole run: newest video, time left, memory, LoRAs for the loaders, "finish now".

    Args:
        bring: makes a network resident.
        config: the run.
        lora_folder: the run's folder of exported LoRAs.
    """

    def __init__(
        self, bring: Callable[[nn.Module], None], config: Config, lora_folder: Path
    ) -> None:
        super().__init__(bring)
        self._config = config
        self._lora_folder = lora_folder
        self._seconds: list[float] = []
        self._evaluation = 0.0
        self._told = False
        self.node_id = host.running.node_id
        self.iteration = 0
        self.finish_requested = False
        self.published: dict[str, str] = {}

    def preview(self, video: np.ndarray, caption: str) -> None:
        """Show a video as a strip of frames with the next tick, and in the monitor."""
        self.strip, self.strip_time = filmstrip(video), time.time()

    def finish(self) -> bool:
        """Whether the user pressed "Finish now"."""
        return self.finish_requested

    def phase(self, name: str, total: int, iteration: int = 0) -> None:
        """Start a bar."""
        self.iteration = max(iteration, self.iteration)
        super().phase(name, total, iteration)

    def event(self, record: dict[str, Any]) -> None:
        """Learn from the run's own log."""
        kind = record["event"]
        if kind == "phase" and record["name"] == "evaluate":
            self._evaluation = record["seconds"]
        elif kind == "lora":
            self.publish(self._lora_folder / record["file"])
        elif kind == "run_started":
            self.iteration = record["iteration"]
        elif kind == "iteration":
            self.iteration = record["iteration"]
            self._seconds = [*self._seconds[-9:], record["seconds"]]
            if not self._told:
                self._told = True
                memory = record.get("peak_memory")
                log.info(
                    "%s: iteration %d took %s, %s left, peak memory %s",
                    self._config.run.name,
                    record["iteration"],
                    duration(record["seconds"]),
                    duration(self.eta() or 0.0),
                    "unknown" if memory is None else f"{memory / 2**30:.1f} GB",
                )
                self._memory = memory

    _memory: int | None = None
    #: What the user should know while nothing happens.
    message = ""

    def publish(self, path: Path) -> str:
        """Put a LoRA of the run where LoraLoader lists it; returns its name there."""
        run = self._config.run.name
        if path.name not in self.published:
            self.published[path.name] = host.publish_lora(path, f"flashgrpo/{run}/{path.stem}")
        return self.published[path.name]

    def eta(self) -> float | None:
        """Seconds to the end of the run; None before the first iteration."""
        if not self._seconds:
            return None
        config, done = self._config, self.iteration
        left = max(config.run.iterations - done, 0)
        every = config.eval.every
        evaluations = (left + every - 1) // every if every else 0
        # The final test samples the policy and the starting policy.
        tests = 2 * config.eval.test_prompts * config.eval.test_seeds
        per_video = self._evaluation / max(config.eval.prompts * config.eval.seeds, 1)
        mean = sum(self._seconds) / len(self._seconds)
        return left * mean + evaluations * self._evaluation + tests * per_video

    def status(self) -> str:
        """The text below the node."""
        parts = [f"iteration {self.iteration} of {self._config.run.iterations}"]
        words = _WORDS.get(self.name, self.name)
        parts.append(f"{words} {self.done}/{self.total}" if self.done else words)
        left = self.eta()
        if left is not None:
            parts.append(f"about {duration(left)} left")
        if self._memory is not None:
            parts.append(f"peak memory {self._memory / 2**30:.1f} GB")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time in words, e.g. `42 s`, `3 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
