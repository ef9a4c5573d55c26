"""Notices when training stands still, and says which process stands still in which phase.

A host around the host: every call of the core passes through it, so it knows when something last
happened. A thread looks at that time; with several processes it also tells the others, through the
key-value store that torch.distributed keeps anyway, and reads what they tell. So rank 0 can name a
rank that hangs elsewhere, and one that does not answer at all.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .control import Control
from .distributed import World

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

log = logging.getLogger(__name__)

_KEY = "flashgrpo/moves"


class Watchdog(Control):
    """Passes everything on to a host and warns once per stall.

    Args:
        host: the host.
        world: the processes.
        limit: seconds without a step forward that count as a stall; 0 watches nothing.
        period: seconds between looks; default a quarter of the limit, at most 10.
    """

    def __init__(
        self, host: Control, world: World, limit: float, period: float | None = None
    ) -> None:
        self.host = host
        self.device = getattr(host, "device", None)
        self.world = world
        self.limit = limit
        self.period = period or min(10.0, limit / 4)
        #: Receives (iteration, code, message): the trainer's `warn` once there is one.
        self.warn: Callable[[int, str, str], None] = lambda iteration, code, text: log.warning(text)
        self._phase, self._iteration = "start", 0
        self._moved = time.monotonic()
        self._beat = 0
        self._stalled: set[int] = set()
        #: rank -> its newest record as text, and when this process first saw it.
        self._seen: dict[int, tuple[str, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.limit > 0:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    # The host's side: note that something happened, pass it on.

    def phase(self, name: str, total: int, iteration: int = 0) -> None:
        """A phase begins."""
        self._phase, self._iteration = name, iteration
        self._moved = time.monotonic()
        self.host.phase(name, total, iteration)

    def tick(self, done: int = 1) -> None:
        """Progress."""
        self._moved = time.monotonic()
        self.host.tick(done)

    def check(self) -> None:
        """Progress too: it comes before each forward, backward, decode chunk and reward call."""
        self._moved = time.monotonic()
        self.host.check()

    def bring(self, network: nn.Module) -> None:
        """Pass on."""
        self.host.bring(network)

    def preview(self, video: np.ndarray, caption: str) -> None:
        """Pass on."""
        self.host.preview(video, caption)

    def finish(self) -> bool:
        """Pass on."""
        return self.host.finish()

    def event(self, record: dict[str, Any]) -> None:
        """Pass on."""
        self.host.event(record)

    # The thread.

    def _watch(self) -> None:
        store = _store() if self.world.size > 1 else None
        while not self._end.wait(self.period):
            try:
                own = self._record()
                for rank in range(self.world.size):
                    text = own if rank == self.world.rank else _read(store, rank)
                    self._look(rank, text)
                if store is not None:
                    store.set(f"{_KEY}/{self.world.rank}", own)
            except Exception as exc:
                # At the end of a run the store goes away before the last process does.
                log.debug("the watchdog stops looking: %s", exc)
                return

    def _record(self) -> str:
        self._beat += 1
        return json.dumps(
            {
                "phase": self._phase,
                "iteration": self._iteration,
                "idle": time.monotonic() - self._moved,
                "waiting": self.world.waiting,
                "beat": self._beat,
            }
        )

    def _look(self, rank: int, text: str | None) -> None:
        """Judge the newest record of a rank by this process's own clock."""
        now = time.monotonic()
        if text is None:
            return
        if self._seen.get(rank, ("", 0.0))[0] != text:
            self._seen[rank] = text, now
        record = json.loads(text)
        silent = now - self._seen[rank][1]
        who = f"process {rank} of {self.world.size}"
        where = f"phase {record['phase']} of iteration {record['iteration']}"
        if silent >= self.limit:
            why = f"{who} has not answered for {silent:.0f} s, last seen in {where}"
        elif record["idle"] >= self.limit and not record["waiting"]:
            why = f"{who} has made no step for {record['idle']:.0f} s in {where}"
        else:
            self._stalled.discard(rank)
            return
        if rank not in self._stalled:
            self._stalled.add(rank)
            self.warn(
                record["iteration"],
                "stall",
                f"{why}: look at its machine (reward server, disk, swap, GPU), or raise run.stall = "
                f"{self.limit:g}",
            )


def _store() -> Any:
    """A connection of its own to the store of the default process group."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    clone = getattr(store, "clone", None)
    return clone() if clone is not None else store


def _read(store: Any, rank: int) -> str | None:
    key = f"{_KEY}/{rank}"
    return store.get(key).decode() if store is not None and store.check([key]) else None
