"""Scoring beside sampling: one micro-batch is scored in a thread while the next is sampled.

It pays when a reward does not compute where the policy does: served by another process or machine,
or on another device. Decoding stays on the thread that samples: the VAE shares the policy's device,
where two threads would only take turns, and hosts move networks from one thread only. The numbers
are the same as without: equal videos are scored one by one, and what compares videos waits until
all are there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch

from .control import Control
from .errors import Cancelled
from .rewards.batch import VideoBatch
from .rewards.mix import Measured, RewardMix
from .rollout import Rollout
from .scoring import whole_or_start
from .wan.decode import decode_latents

#: Decoded micro-batches that may wait for the scoring thread; memory is bounded by it.
WAITING = 2


class Timeline:
    """What was done when, in seconds since its start: lanes of `(start, end)`."""

    def __init__(self) -> None:
        self._origin = time.monotonic()
        self._sampling = 0.0
        self.lanes: dict[str, list[tuple[float, float]]] = {
            lane: [] for lane in ("sample", "decode", "wait", "score")
        }

    @contextmanager
    def span(self, lane: str) -> Iterator[None]:
        """Record how long the block takes."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.lanes[lane].append((start - self._origin, end - self._origin))

    def sampling(self) -> None:
        """Sampling begins or goes on here."""
        self._sampling = time.monotonic() - self._origin

    def sampled(self) -> None:
        """A micro-batch has been sampled."""
        self.lanes["sample"].append((self._sampling, time.monotonic() - self._origin))

    def record(self) -> dict[str, Any]:
        """The fields of a `timeline` event, rounded to milliseconds."""
        lanes = {
            lane: [[round(a, 3), round(b, 3)] for a, b in spans]
            for lane, spans in self.lanes.items()
        }
        return {"lanes": lanes, "seconds": round(time.monotonic() - self._origin, 3)}


class _ThreadControl(Control):
    """What rewards see of the host in the thread: they can be stopped, and show nothing."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def check(self) -> None:
        """Raise `Cancelled` once the run goes no further."""
        if self.stop.is_set():
            raise Cancelled("the run has stopped")


class ScoringThread:
    """Measures micro-batches in the order in which they come.

    Use it as a context manager: leaving it early stops the thread at the next video.

    Args:
        reward: the reward mix.
        timeline: where the thread's work is recorded.
    """

    def __init__(self, reward: RewardMix, timeline: Timeline) -> None:
        self._reward = reward
        self._timeline = timeline
        self._control = _ThreadControl()
        self._batches: queue.Queue[VideoBatch | None] = queue.Queue(WAITING)
        self._measured: list[Measured] = []
        self._put = 0
        self._failure: BaseException | None = None
        # A daemon: a reward that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="reward", daemon=True)

    def __enter__(self) -> ScoringThread:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._control.stop.set()
        with self._batches.mutex:
            self._batches.queue.clear()
            self._batches.queue.append(None)
            self._batches.not_empty.notify()
        self._thread.join(5.0)

    def put(self, batch: VideoBatch, control: Control) -> None:
        """Hand a micro-batch over; waits while `WAITING` others do.

        Raises:
            FlashGRPOError: a reward has failed.
            Cancelled: the host has stopped.
        """
        while True:
            self._raise()
            control.check()
            try:
                self._batches.put(batch, timeout=0.2)
            except queue.Full:
                continue
            self._put += len(batch)
            return

    def finish(self, count: int, control: Control) -> list[Measured]:
        """Wait for what is left; returns the scores of all `count` micro-batches in order.

        Raises:
            FlashGRPOError: a reward has failed.
            Cancelled: the host has stopped.
        """
        done = len(self._measured)
        while len(self._measured) < count:
            self._raise()
            control.check()
            time.sleep(0.01)
            for found in self._measured[done:]:
                control.tick(len(found.valid))
                done += 1
        return self._measured

    @property
    def left(self) -> int:
        """Videos that have been handed over and are not scored yet."""
        return self._put - sum(len(found.valid) for found in self._measured)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while (batch := self._batches.get()) is not None:
                with self._timeline.span("score"):
                    self._measured.append(self._reward.measure(batch, self._control))
        except BaseException as exc:
            self._failure = exc


def decode(
    vae: Any, rollout: Rollout, fps: float, decode_batch: int, control: Control, frames: int
) -> VideoBatch:
    """The first `frames` frames of a rollout's videos, decoded in the same parts as without overlap."""
    parts: list[np.ndarray] = []
    n = len(rollout.samples)
    group = rollout.group
    for start in range(0, n, decode_batch):
        control.check()
        shown = rollout.samples[start] == 0
        latents = rollout.final[start : start + decode_batch]
        videos = decode_latents(vae, whole_or_start(latents, frames, shown))
        if shown:
            control.preview(videos[0], group.prompt)
        parts.append(videos[:, :frames])
    return VideoBatch(np.concatenate(parts), [group.prompt] * n, fps, [group.group_id] * n)


def obstacle(rewards: Sequence[Any], control: Control, offload: bool) -> str | None:
    """Why scoring cannot run beside sampling here, with the fix; None when it can.

    A host that moves networks (ComfyUI, `model.offload`) would take the policy off the device in
    the middle of a forward to make room for a reward model.
    """
    if offload:
        return "model.offload keeps one network on the device: set it to false"
    for reward in rewards:
        local = hasattr(reward, "networks") and getattr(reward, "device", "auto") == "auto"
        if local and control.device is not None:
            return (
                f"reward {reward.name!r} shares the policy's device: serve it with flashgrpo "
                "reward-server, or set its device"
            )
    return None
