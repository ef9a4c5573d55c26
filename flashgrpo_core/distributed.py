"""The processes that train together, seen as one sum.

Each rank fills in its own part of an array of zeros and the arrays are added up; nothing else is
ever exchanged: rewards, statistics and LoRA gradients. Before each sum every rank says whether it
goes on, so that one that is asked to stop, or fails, takes the others with it at the same point.
`accelerate` reads how the program was launched and sets up torch.distributed; none of its
process-wide training state is used, so a foreign `Accelerator` in the same process does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from .errors import Cancelled, FlashGRPOError

if TYPE_CHECKING:
    from .sharding import Lockstep

T = TypeVar("T")

#: What a rank says when the ranks meet.
_GOES_ON, _STOPS, _FAILED = 0.0, 1.0, 2.0

#: What the back ends write when a peer is gone or silent; gloo has no exception type of its own.
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out")


class World:
    """This process's place among `size` ones. The default is a single process.

    Attributes:
        rank: number of this process, 0 is the one that writes.
        size: number of processes.
        device: where tensors must lie to be exchanged.
        local_rank: number of this process on its machine.
        local_size: largest number of processes on one machine.
        waiting: whether this process is waiting for the others now (the watchdog reads it).
        lockstep: keeps the numbers of forwards equal when the weights are sharded, else None.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, device: torch.device | None = None, local_rank: int = 0
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self.local_rank = local_rank
        self.waiting = False
        self.lockstep: Lockstep | None = None
        self._parted = size == 1
        self.local_size = 1

    @classmethod
    def launched(cls, cpu: bool = False, timeout: float = 1800.0) -> World:
        """The world that `accelerate launch` or `torchrun` set up; single-process otherwise.

        Args:
            cpu: stay on the CPU although there is a GPU.
            timeout: seconds after which waiting for another process is an error.
        """
        from accelerate import PartialState

        state = PartialState(cpu=cpu, timeout=timedelta(seconds=timeout))
        world = cls(
            state.process_index, state.num_processes, state.device, state.local_process_index
        )
        world.local_size = int(world.gather([world.local_rank + 1.0]).max())
        return world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add the tensors of all ranks in place (float64 for anything whose order matters)."""
        if self.size > 1:
            self.waiting = True
            try:
                self._meet(_GOES_ON)
                with self.watching_peers():
                    shared = tensor.to(self.device)
                    torch.distributed.all_reduce(shared)
                    if shared is not tensor:
                        tensor.copy_(shared)
            finally:
                self.waiting = False
        return tensor

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """Sum of a float64 array over ranks."""
        if self.size == 1:
            return array
        return self.sum_(torch.from_numpy(np.ascontiguousarray(array, np.float64)).clone()).numpy()

    def gather(self, row: Sequence[float]) -> np.ndarray:
        """Every rank's row of numbers, float64 `[size, len(row)]`."""
        rows = np.zeros((self.size, len(row)))
        rows[self.rank] = row
        return self.sum_array(rows)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.sum_array(np.zeros(1))

    def rest(self) -> None:
        """Call after this rank's share of forwards: it takes part in those the others still make.

        Nothing needs to be done unless the weights are sharded.
        """
        if self.lockstep is not None:
            self.lockstep.rest()

    def anyone(self, flag: bool) -> bool:
        """Whether `flag` is set on at least one rank; the same answer on all."""
        return flag if self.size == 1 else bool(self.sum_array(np.array([float(flag)]))[0])

    def leave(self, *, failed: bool = False) -> None:
        """Tell the other ranks that this one goes no further: they stop where they next meet.

        Without it they would wait in a sum that never completes. Nothing happens when the ranks
        have parted already.

        Args:
            failed: it had an error; otherwise it was asked to stop.
        """
        if not self._parted:
            with suppress(Exception):  # the reason why this rank leaves matters more
                self._meet(_FAILED if failed else _STOPS)
        self._parted = True

    def _meet(self, word: float) -> None:
        """Hear what every rank says; precedes each exchange.

        Raises:
            Cancelled: a rank was asked to stop.
            FlashGRPOError: a rank has failed.
        """
        words = torch.zeros(self.size, dtype=torch.float64)
        words[self.rank] = word
        words = words.to(self.device)
        with self.watching_peers():
            torch.distributed.all_reduce(words)
            said = words.tolist()
        self._parted = any(said)
        if _FAILED in said:
            raise FlashGRPOError(
                f"process {said.index(_FAILED)} of {self.size} stopped with an error: see its "
                "message, then resume"
            )
        if _STOPS in said:
            raise Cancelled(f"process {said.index(_STOPS)} was asked to stop")

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Let the processes of a machine through one after the other.

        For what all need but only one at a time can afford, such as a whole model in memory, or
        what the second finds done by the first.
        """
        for _ in range(self.local_rank):
            self.barrier()
        yield
        for _ in range(self.local_size - self.local_rank):
            self.barrier()

    def deal(self, items: Sequence[T], cost: Callable[[T, T | None], int] | None = None) -> list[T]:
        """This rank's contiguous part, so that the micro-batches of a group stay together.

        Args:
            items: the work, in order.
            cost: `cost(item, before)`, at least 1, of an item that follows `before` on the same
                rank (None: it is the rank's first); default 1 each. The dearest part is as cheap
                as can be.
        """
        cuts = even_cuts(items, self.size, cost or (lambda item, before: 1))
        return list(items[cuts[self.rank] : cuts[self.rank + 1]])

    @contextmanager
    def watching_peers(self) -> Iterator[None]:
        """Say in plain words when another process of this world is gone or silent.

        Raises:
            FlashGRPOError: instead of the back end's error.
        """
        try:
            yield
        except RuntimeError as exc:
            text = str(exc)
            if self.size == 1 or not any(sign in text.lower() for sign in _LOST):
                raise
            self._parted = True
            raise FlashGRPOError(
                f"process {self.rank} of {self.size} lost the others: one was ended, cannot be reached or did "
                f"not answer within run.timeout ({text.strip().splitlines()[-1][-160:]}); look at their "
                "messages, then start the same command again: it resumes"
            ) from exc


def even_cuts(items: Sequence[T], parts: int, cost: Callable[[T, T | None], int]) -> list[int]:
    """Boundaries (`parts + 1` indices) of contiguous parts whose dearest is as cheap as possible.

    Among those each part is filled before the next, and the rest is cut evenly again, so that
    parts of equal items differ by one item at most.
    """

    def end_of(start: int, limit: int) -> int:
        spent, stop = 0, start
        while stop < len(items):
            spent += cost(items[stop], items[stop - 1] if stop > start else None)
            if spent > limit:
                break
            stop += 1
        return stop

    def fits(start: int, left: int, limit: int) -> bool:
        for _ in range(left):
            start = end_of(start, limit)
        return start == len(items)

    cuts = [0]
    for left in range(parts, 0, -1):
        start = cuts[-1]
        low, high = 0, sum(cost(item, None) for item in items[start:])
        while low < high:  # the smallest limit with which the rest fits into the parts left
            middle = (low + high) // 2
            low, high = (low, middle) if fits(start, left, middle) else (middle + 1, high)
        cuts.append(end_of(start, high))
    return cuts
