"""What all rewards with a neural network share: files, loading once, device, frames in batches."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ..control import Control
from ..devices import pick_device
from ..errors import FlashGRPOError
from .batch import VideoBatch
from .options import choice, frame_rule, number

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Folder of reward models below ComfyUI's `models` folder.
FOLDER = "flashgrpo_rewards"

#: Loaded models by files, dtype and device. Rewards that use one model share it, and it leaves
#: memory with the last of them.
_loaded: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


class ModelReward(ABC):
    """Base of the rewards with a network. Nothing is loaded before the first score.

    Class attributes beside those of every reward (see the package):
        files: option -> a folder or file name to look up (see `lookup.resolve_terms`).
        source: where the weights come from and what to put where.
        memory: memory of the weights.
        licence: licence of the weights.

    Args:
        dtype: `auto` (bf16 on a GPU, fp32 on the CPU), `fp32`, `bf16` or `fp16`.
        device: `auto` (where the run computes), `cpu`, `cuda:1`, ...
        **files: the options of `files`; absolute paths, or relative to the working folder.

    Raises:
        FlashGRPOError: a bad option, or a file that is not there; the message says what belongs
            where.
    """

    name: str
    files: ClassVar[dict[str, str]] = {}
    source: ClassVar[str] = ""

    def __init__(self, dtype: str, device: str, **files: str) -> None:
        self.dtype = choice(self.name, "dtype", dtype, ("auto", *DTYPES))
        if not isinstance(device, str) or not device:
            raise FlashGRPOError(f"reward {self.name!r}: device = {device!r} must be auto or cpu")
        self.device = device
        self.paths = {option: self._path(option, value) for option, value in files.items() if value}
        self._model: Any = None

    def _path(self, option: str, value: Any) -> Path:
        if not isinstance(value, str):
            raise FlashGRPOError(f"reward {self.name!r}: {option} = {value!r} must be a name")
        path = Path(value).expanduser().absolute()
        if not path.exists():
            raise FlashGRPOError(missing(type(self), option, value))
        return path

    def networks(self) -> list[nn.Module]:
        """The networks in memory; empty before the first score."""
        return [] if self._model is None else [self._model.network]

    @abstractmethod
    def _load(self, dtype: torch.dtype) -> Any:
        """Load the model on the CPU: an object with `network`."""

    def model(self, control: Control) -> Any:
        """The model, loaded and on its device.

        A host that moves networks itself is asked to bring it; else it is moved here. A device
        that the user chose is no business of the host.
        """
        host = control.device if self.device == "auto" else None
        target = host or pick_device(self.device, f"reward {self.name!r}: device")
        if self._model is None:
            dtype = self._compute_dtype(target)
            key = (type(self)._load, dtype, self.device, _stamps(self.paths))
            self._model = _loaded.get(key)
            if self._model is None:
                self._model = self._load(dtype)
                if host is None:
                    self._model.network.to(target)
                _loaded[key] = self._model
        if self.device == "auto":
            control.bring(self._model.network)
        return self._model

    def _compute_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        return torch.float32 if device.type == "cpu" else torch.bfloat16


class FrameReward(ModelReward):
    """Base of the model rewards that score frames.

    Args:
        batch: frames per forward.
        frames: how the frames' scores become the video's (see `options.AGGREGATES`).
        every: use every n-th frame, the first one always.
        dtype: see `ModelReward`.
        device: see `ModelReward`.
        **files: see `ModelReward`.
    """

    def __init__(
        self, batch: int, frames: str, every: int, dtype: str, device: str, **files: str
    ) -> None:
        super().__init__(dtype, device, **files)
        self.batch = int(number(self.name, "batch", batch, 1, 1024))
        self.rule = frame_rule(self.name, frames, every)

    def score(self, batch: VideoBatch, control: Control | None = None) -> dict[str, np.ndarray]:
        """See the class."""
        control = control or Control()
        values = []
        for video, prompt in zip(batch.videos, batch.prompts, strict=True):
            chosen = self.rule.pick(video)
            scores = []
            for start in range(0, len(chosen), self.batch):
                control.check()
                model = self.model(control)
                with torch.no_grad():
                    some = self._score_frames(model, chosen[start : start + self.batch], prompt)
                scores.append(some.double().cpu().numpy())
            values.append(self.rule.total(np.concatenate(scores)))
        return {self.name: np.array(values, dtype=np.float64)}

    @abstractmethod
    def _score_frames(self, model: Any, frames: np.ndarray, prompt: str) -> torch.Tensor:
        """Scores `[n]` of frames uint8 `[n, H, W, 3]` of one prompt."""


def once(memo: dict[str, torch.Tensor], key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A value by its text, computed once; the newest 64 are kept.

    A group's videos share one prompt, and come one after the other.
    """
    if key not in memo:
        while len(memo) >= 64:
            del memo[next(iter(memo))]
        memo[key] = make()
    return memo[key]


def missing(cls: Any, option: str, value: str) -> str:
    """What to tell a user whose model file is not there."""
    return (
        f"reward {cls.name!r}: {option} = {value!r} was not found: {cls.source}; put it into "
        f"models/{FOLDER} and give its name there"
    )


def _stamps(paths: dict[str, Path]) -> tuple[Any, ...]:
    """What changes when a file is replaced."""
    found = []
    for option, path in sorted(paths.items()):
        parts = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(str(p), os.stat(p)) for p in parts]
        found.append((option, tuple((name, s.st_mtime_ns, s.st_size) for name, s in stats)))
    return tuple(found)
