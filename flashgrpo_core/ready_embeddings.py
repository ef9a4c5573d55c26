"""Prompt embeddings that a host has made, as one file: how they reach a worker.

The worker has no CLIP object. The file holds each embedding without its padding, under the SHA-256
of its prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from .errors import FlashGRPOError
from .files import open_tensors, write_tensors

_WIDTH = 4096


def write_embeddings(
    path: Path,
    texts: Iterable[str],
    lengths: Mapping[str, int],
    fetch: Callable[[str], torch.Tensor],
) -> None:
    """Write embeddings, one in memory at a time.

    Args:
        path: the `.safetensors` file.
        texts: the prompts.
        lengths: tokens of each prompt's embedding.
        fetch: gives the embedding of a prompt, fp32 `[tokens, 4096]`.
    """
    names = {text_key(text): text for text in texts}
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        key: (torch.float32, (lengths[text], _WIDTH)) for key, text in names.items()
    }
    write_tensors(path, layout, lambda key: fetch(names[key]))


class ReadyEmbeddings(Mapping[str, torch.Tensor]):
    """Prompt -> embedding fp32 `[tokens, 4096]`, read from the file when it is asked for.

    Args:
        path: a file of `write_embeddings`.
        texts: the prompts that may be asked for; those that the file lacks are left out.
        tokens: length of the text context.

    Raises:
        FlashGRPOError: the file is missing or broken.
    """

    def __init__(self, path: Path, texts: Iterable[str], tokens: int) -> None:
        self._file = open_tensors(path)
        self._tokens = tokens
        self._texts = [text for text in dict.fromkeys(texts) if text_key(text) in self._file]

    def __getitem__(self, text: str) -> torch.Tensor:
        if text_key(text) not in self._file:
            raise KeyError(text)
        found = self._file.get(text_key(text))[: self._tokens]
        if found.ndim != 2 or found.shape[1] != _WIDTH:
            raise FlashGRPOError(
                f"the embedding of prompt {text[:80]!r} has shape {list(found.shape)}, not "
                f"[tokens, {_WIDTH}]: queue the workflow again"
            )
        return torch.nn.functional.pad(found.float(), (0, 0, 0, self._tokens - len(found)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def text_key(text: str) -> str:
    """Name of a prompt's embedding in the file."""
    return hashlib.sha256(text.encode()).hexdigest()
