"""The processes that train together, seen as one sum.

Each rank fills in its own part of an array of zeros and the arrays are added up; nothing else is
ever exchanged: rewards, statistics and LoRA gradients. `accelerate` reads how the program was
launched and sets up torch.distributed; none of its process-wide training state is used, so a
foreign `Accelerator` in the same process does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


class World:
    """This process's place among `size` ones. The default is a single process."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")

    @classmethod
    def launched(cls, cpu: bool = False) -> World:
        """The world that `accelerate launch` or `torchrun` set up; single-process otherwise."""
        from accelerate import PartialState

        state = PartialState(cpu=cpu)
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add the tensors of all ranks in place (float64 for anything whose order matters)."""
        if self.size > 1:
            shared = tensor.to(self.device)
            torch.distributed.all_reduce(shared)
            if shared is not tensor:
                tensor.copy_(shared)
        return tensor

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """Sum of a float64 array over ranks."""
        if self.size == 1:
            return array
        return self.sum_(torch.from_numpy(np.ascontiguousarray(array, np.float64)).clone()).numpy()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            torch.distributed.barrier()

    def deal(self, items: Sequence[T]) -> list[T]:
        """This rank's contiguous part, so that the micro-batches of a group stay together."""
        n = len(items)
        return list(items[self.rank * n // self.size : (self.rank + 1) * n // self.size])
