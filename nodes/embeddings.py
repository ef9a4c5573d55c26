"""Prompt embeddings: computed once by a file or a CLIP object, kept on disk, read when needed.

A run of a few hundred prompts would hold gigabytes of padded embeddings in memory; a look-up reads
one small file instead.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..flashgrpo_core import embedded
from ..flashgrpo_core.control import Control
from ..flashgrpo_core.errors import FlashGRPOError
from ..flashgrpo_core.files import open_tensors, save_tensors
from ..flashgrpo_core.wan.text import cached_embeddings
from . import host, pool
from .values import ModelFiles, Prompts

TINY = "tiny"
#: Embeddings kept in memory, of at most 8 MB each.
_KEPT = 48
_WIDTH = 4096


class Embeddings(Mapping[str, torch.Tensor]):
    """Prompt -> embedding fp32 `[tokens, 4096]`, read from the disk on first use.

    Args:
        texts: the prompts that may be asked for.
        fetch: gives the embedding of one of them.
    """

    def __init__(self, texts: Iterable[str], fetch: Callable[[str], torch.Tensor]) -> None:
        self._texts = dict.fromkeys(texts)
        self._fetch = fetch
        self._found: OrderedDict[str, torch.Tensor] = OrderedDict()

    def __getitem__(self, text: str) -> torch.Tensor:
        if text not in self._texts:
            raise KeyError(text)
        if text not in self._found:
            self._found[text] = self._fetch(text)
            if len(self._found) > _KEPT:
                self._found.popitem(last=False)
        self._found.move_to_end(text)
        return self._found[text]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def embed(
    prompts: Prompts,
    files: ModelFiles | None,
    texts: Iterable[str],
    control: Control,
    now: Iterable[str] | None = None,
) -> Embeddings:
    """Embeddings of some prompts; those that are not on disk are computed now.

    Args:
        prompts: says which encoder.
        files: the model, whose text context may be shorter; None takes the encoder's.
        texts: what may be asked for.
        control: progress and cancel.
        now: what is computed now; the rest on demand. None is all.

    Raises:
        FlashGRPOError: the encoder does not fit, or a CLIP object has not encoded a prompt.
    """
    wanted = sorted(set(texts))
    tokens = prompts.tokens or context_length(prompts.encoder, files)
    if prompts.folder is not None:
        folder = prompts.folder
        return Embeddings(wanted, lambda text: _stored(folder, text, tokens))
    path = encoder_path(prompts.encoder)

    def compute(some: list[str]) -> dict[str, torch.Tensor]:
        on_cpu = host.compute_device().type == "cpu"
        try:
            return cached_embeddings(
                some,
                path,
                tokens,
                cache_folder(),
                torch.float32 if on_cpu else torch.bfloat16,
                host.offload_device(),
                control,
            )
        finally:
            pool.release_guests()

    compute(wanted if now is None else sorted(set(now)))
    return Embeddings(wanted, lambda text: compute([text])[text])


def embed_with_clip(clip: Any, texts: Iterable[str], control: Control) -> tuple[str, Path]:
    """Encode prompts with a CLIP object; returns its fingerprint and where the results lie.

    Raises:
        FlashGRPOError: the CLIP object is not Wan's.
    """
    fingerprint = host.clip_fingerprint(clip)
    folder = cache_folder() / f"clip-{fingerprint[:32]}"
    missing = [text for text in sorted(set(texts)) if not _file(folder, text).is_file()]
    control.phase("encode", len(missing))
    for text in missing:
        control.check()
        embedding = host.encode_with_clip(clip, text)
        if embedding.shape[-1] != _WIDTH:
            raise FlashGRPOError(
                f"the connected CLIP gives embeddings of width {embedding.shape[-1]}, Wan needs "
                f"{_WIDTH}: use CLIPLoader with type wan and a umt5_xxl file"
            )
        save_tensors(_file(folder, text), {"embedding": embedding})
        control.tick()
    return fingerprint, folder


def context_length(encoder: str, files: ModelFiles | None) -> int:
    """Tokens of the text context: short for the tiny Wan, which was trained that way."""
    tiny = encoder == TINY if files is None else files.tiny
    return embedded.TINY_TEXT_TOKENS if tiny else embedded.TEXT_TOKENS


def encoder_path(encoder: str) -> str:
    """Path of a text encoder file."""
    return str(embedded.TINY_TEXT_ENCODER) if encoder == TINY else encoder


def cache_folder() -> Path:
    """Where embeddings lie; the command line uses the same folder."""
    return host.output_folder() / "flashgrpo" / "cache"


def _file(folder: Path, text: str) -> Path:
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"


def stored_file(folder: Path, text: str) -> Path:
    """File of an embedding that a CLIP object has made.

    Raises:
        FlashGRPOError: it has not encoded this prompt.
    """
    file = _file(folder, text)
    if not file.is_file():
        raise FlashGRPOError(
            f"prompt {text[:80]!r} has not been encoded by the connected CLIP: queue the workflow "
            "again after a change of the Prompts node"
        )
    return file


def _stored(folder: Path, text: str, tokens: int) -> torch.Tensor:
    embedding = open_tensors(stored_file(folder, text)).get("embedding")[:tokens]
    return torch.nn.functional.pad(embedding, (0, 0, 0, tokens - len(embedding)))
