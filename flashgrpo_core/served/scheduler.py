"""The one thread of a reward server that scores, and the queue in front of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..errors import FlashGRPOError
from ..rewards.batch import VideoBatch
from ..rewards.mix import RewardMix
from .protocol import RequestError

log = logging.getLogger(__name__)

Values = dict[str, np.ndarray]


@dataclass(eq=False)
class _Job:
    reward: str
    batch: VideoBatch
    done: asyncio.Future[Values]
    gone: Callable[[], bool]


class Scheduler:
    """Scores jobs one after the other; equal-sized jobs that wait together share a batch.

    Args:
        rewards: the served rewards by name, each as a mix of one term.
        queue: jobs that may wait; more are refused.
        batch: videos that are scored together.
        timeout: seconds after which a job is given up. A thread cannot be ended: the work goes on,
            and jobs behind it wait or are refused.
    """

    def __init__(
        self, rewards: dict[str, RewardMix], queue: int, batch: int, timeout: float
    ) -> None:
        self.rewards = rewards
        self.queue_limit = queue
        self.batch_limit = batch
        self.timeout = timeout
        self.scored = self.failed = 0
        self._waiting: deque[_Job] = deque()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "reward")
        self._busy_since: float | None = None

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def busy_seconds(self) -> float:
        """How long the running batch has been running; 0 when idle."""
        return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    def admit(self) -> None:
        """Refuse a job that would have to wait behind a full queue.

        Raises:
            RequestError: 503, with the time to try again.
        """
        if len(self._waiting) >= self.queue_limit:
            raise RequestError(503, f"{len(self._waiting)} requests wait already", retry_after=1.0)

    async def score(self, reward: str, batch: VideoBatch, gone: Callable[[], bool]) -> Values:
        """Wait for the scores of a batch.

        Args:
            reward: name of the reward.
            batch: the videos.
            gone: whether nobody waits for the answer any more.

        Returns:
            All values that the reward reports, float64 `[B]` each.

        Raises:
            RequestError: the queue is full, the time is up, or the reward failed.
        """
        self.admit()
        job = _Job(reward, batch, asyncio.get_running_loop().create_future(), gone)
        self._waiting.append(job)
        self._wake.set()
        try:
            return await asyncio.wait_for(job.done, self.timeout)
        except TimeoutError:
            raise RequestError(
                504, f"the scores took longer than {self.timeout:g} s: send fewer or shorter videos"
            ) from None

    async def run(self) -> None:
        """Score until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._score(self._next())

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> list[_Job]:
        """The oldest job and those behind it that fit into a batch with it."""
        jobs = [self._waiting.popleft()]
        first, videos = jobs[0], len(jobs[0].batch)
        while self._waiting:
            job = self._waiting[0]
            same = job.reward == first.reward and job.batch.fps == first.batch.fps
            same &= job.batch.videos.shape[1:] == first.batch.videos.shape[1:]
            if not same or videos + len(job.batch) > self.batch_limit:
                break
            jobs.append(self._waiting.popleft())
            videos += len(job.batch)
        return [job for job in jobs if not job.done.done() and not job.gone()]

    async def _score(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        loop = asyncio.get_running_loop()
        self._busy_since = time.monotonic()
        try:
            batch = _joined([job.batch for job in jobs])
            values = await loop.run_in_executor(self._thread, self._values, jobs[0].reward, batch)
        except Exception as exc:
            if len(jobs) > 1:
                # One of them is to blame: the others shall not pay for it.
                for job in jobs:
                    await self._score([job])
                return
            self.failed += len(jobs[0].batch)
            log.warning("reward %s failed: %s", jobs[0].reward, exc, exc_info=_unexpected(exc))
            _answer(jobs[0], RequestError(500, f"the reward failed: {_line(exc)}"))
            return
        finally:
            self._busy_since = None
        start = 0
        for job in jobs:
            stop = start + len(job.batch)
            _answer(job, {key: value[start:stop] for key, value in values.items()})
            start = stop
        self.scored += start

    def _values(self, reward: str, batch: VideoBatch) -> Values:
        mix = self.rewards[reward]
        scores = mix.score(batch)
        return {**scores.parts, **scores.terms}


def _joined(batches: list[VideoBatch]) -> VideoBatch:
    if len(batches) == 1:
        return batches[0]
    starts = None
    if any(batch.start_images is not None for batch in batches):
        starts = [image for b in batches for image in b.start_images or [None] * len(b)]
    return VideoBatch(
        np.concatenate([batch.videos for batch in batches]),
        [prompt for batch in batches for prompt in batch.prompts],
        batches[0].fps,
        [group for batch in batches for group in batch.group_ids],
        starts,
    )


def _answer(job: _Job, result: Values | Exception) -> None:
    if job.done.done():  # the time was up
        return
    if isinstance(result, Exception):
        job.done.set_exception(result)
    else:
        job.done.set_result(result)


def _unexpected(exc: BaseException) -> bool:
    return not isinstance(exc, FlashGRPOError)


def _line(exc: BaseException) -> str:
    text = " ".join(str(exc).split())[:300]
    return text if isinstance(exc, FlashGRPOError) else f"{type(exc).__name__}: {text}"
