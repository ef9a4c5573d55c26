"""The command line as a host: progress bars, one line per iteration, and a clean stop on Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import weakref
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from .control import Control
from .errors import Cancelled
from .runs.charts import duration, number

if TYPE_CHECKING:
    import torch
    from torch import nn

_BAR = 24
_REDRAW = 0.1  # seconds


class TerminalControl(Control):
    """Shows a run on a text stream; on a terminal the current phase is a bar that redraws.

    Args:
        iterations: planned iterations, for the time that is left; 0 when there is no such thing.
        stream: where to write; default standard error, so that standard output stays the result.
        offload: keep only the network of the current phase on its device.
        quiet: write nothing (ranks other than the main one).

    Attributes:
        title: line to write before the first phase.
    """

    def __init__(
        self,
        iterations: int = 0,
        *,
        stream: TextIO | None = None,
        offload: bool = False,
        quiet: bool = False,
    ) -> None:
        self.stream = stream or sys.stderr
        self.iterations = iterations
        self.offload = offload
        self.quiet = quiet
        self.tty = bool(getattr(self.stream, "isatty", lambda: False)())
        self.stop_requested = False
        self.title = ""
        self._phase = ("", 0, 0)  # name, total, iteration
        self._done = 0
        self._started = self._drawn = time.monotonic()
        self._bar_shown = False
        self._recent: deque[float] = deque(maxlen=20)
        self._homes: weakref.WeakKeyDictionary[nn.Module, torch.device] = (
            weakref.WeakKeyDictionary()
        )
        full, empty = "█", "░"
        try:
            (full + empty + "→±").encode(self.stream.encoding or "ascii")
        except (UnicodeEncodeError, LookupError, AttributeError):
            full, empty = "#", "-"
        self._blocks = (full, empty)

    # What the core calls.

    def phase(self, name: str, total: int, iteration: int = 0) -> None:
        """Start the bar of a phase; before the first comes the title, so that an error stands alone."""
        if self.title:
            self.title, title = "", self.title
            self.note(title)
        self._phase, self._done = (name, total, iteration), 0
        self._started = time.monotonic()
        self._draw(force=True)

    def tick(self, done: int = 1) -> None:
        """Move the bar."""
        self._done += done
        self._draw(force=self._done >= self._phase[1])

    def check(self) -> None:
        """Raise `Cancelled` once Ctrl-C was pressed."""
        if self.stop_requested:
            raise Cancelled("stopped on request")

    def bring(self, network: nn.Module) -> None:
        """With `offload`, move the others to the CPU and this one to where it was loaded."""
        if not self.offload or not hasattr(network, "parameters"):
            return
        if network not in self._homes:
            # With `offload` networks are loaded into main memory.
            here = next(network.parameters()).device
            self._homes[network] = getattr(network, "home", here)
        for other in list(self._homes):
            if other is not network:
                other.to("cpu")
        network.to(self._homes[network])

    def event(self, record: dict[str, Any]) -> None:
        """Write a line for each iteration, evaluation and end of a run."""
        line = self._line(record)
        if line:
            self.note(line)

    # What the command line calls.

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        if self.quiet:
            return
        self.clear()
        self.stream.write(text + "\n")
        self.stream.flush()
        self._draw(force=True)

    def clear(self) -> None:
        """Take the bar off the terminal."""
        if self._bar_shown:
            self.stream.write("\r\x1b[K")
            self._bar_shown = False

    def close(self) -> None:
        """End the last phase."""
        self.clear()
        self._phase = ("", 0, 0)
        self.stream.flush()

    def _line(self, record: dict[str, Any]) -> str:
        kind, iteration = record.get("event"), record.get("iteration", 0)
        if kind == "iteration":
            reward = record.get("reward") or {}
            seconds = float(record.get("seconds") or 0.0)
            self._recent.append(seconds)
            parts = [
                f"iteration {iteration}" + (f"/{self.iterations}" if self.iterations else ""),
                f"reward {number(reward.get('mean'))}",
                f"std {number(record.get('advantage_std'))}",
                f"grad {number(record.get('grad_norm'))}",
                f"drift {number(record.get('ratio_drift'))}",
                duration(seconds),
            ]
            left = self.iterations - int(iteration)
            if left > 0:
                parts.append(f"left {duration(left * sum(self._recent) / len(self._recent))}")
            return "  ".join(parts)
        if kind == "evaluation":
            if not iteration:
                return f"{record.get('split')} start  reward {number(record.get('reward_mean'))}"
            return f"{record.get('split')} at iteration {iteration}  {result_words(record)}"
        if kind == "run_started" and record.get("resumed_from") is not None:
            return f"resumed after iteration {record['resumed_from']}"
        return ""

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        name, total, iteration = self._phase
        if self.quiet or not self.tty or not name or total <= 0:
            return
        if not force and now - self._drawn < _REDRAW:
            return
        self._drawn = now
        done = min(self._done, total)
        filled = round(_BAR * done / total)
        bar = self._blocks[0] * filled + self._blocks[1] * (_BAR - filled)
        left = ""
        if 0 < done < total:
            left = f"  {duration((now - self._started) * (total - done) / done)} left"
        place = f"iteration {iteration}  " if iteration else ""
        self.stream.write(f"\r\x1b[K{place}{name:<9}{bar} {done}/{total}{left}")
        self.stream.flush()
        self._bar_shown = True


def result_words(record: dict[str, Any]) -> str:
    """An evaluation in one line: start, trained, difference, interval."""
    text = (
        f"reward {number(record.get('baseline_mean'))} -> {number(record.get('reward_mean'))}, "
        f"difference {number(record.get('difference'), signed=True)}"
    )
    if record.get("ci_low") is not None and record.get("ci_high") is not None:
        low, high = number(record["ci_low"], True), number(record["ci_high"], True)
        text += f" (95 % interval {low} to {high})"
    return text


class LogToControl(logging.Handler):
    """Log records as notes, so that they do not tear the bar."""

    def __init__(self, control: TerminalControl) -> None:
        super().__init__(logging.WARNING)
        self.control = control

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self.control.note(f"{record.levelname.lower()}: {record.getMessage()}")


class Session:
    """Context in which a signal asks `control` to stop, and log records go through it.

    The first Ctrl-C or SIGTERM stops at the next safe point; a second one ends the program at once.
    Launchers pass on a signal that the terminal has sent as well, so what follows within a moment
    is the same request.
    """

    _SAME = 1.0  # seconds

    def __init__(self, control: TerminalControl) -> None:
        self.control = control
        self._handler = LogToControl(control)
        self._before: dict[int, Any] = {}
        self._asked: float | None = None

    def __enter__(self) -> TerminalControl:
        for number_ in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number_] = signal.signal(number_, self._on_signal)
            except ValueError:  # not the main thread: the caller handles signals
                break
        root = logging.getLogger("flashgrpo_core")
        root.addHandler(self._handler)
        root.propagate = False
        return self.control

    def __exit__(self, *exc: object) -> None:
        self.control.close()
        root = logging.getLogger("flashgrpo_core")
        root.removeHandler(self._handler)
        root.propagate = True
        for number_, handler in self._before.items():
            signal.signal(number_, handler)

    def _on_signal(self, number_: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            self.control.stop_requested = True
            self.control.note("stopping after the current step; press Ctrl-C again to end at once")
        elif now - self._asked > self._SAME:
            self.control.note("ended at once; what was saved before can be resumed")
            # No clean-up that could take long: a run survives an end at any moment.
            os._exit(128 + number_)
