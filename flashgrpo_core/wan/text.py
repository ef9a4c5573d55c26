"""Prompt embeddings: the UMT5 encoder, its tokenizer, and a cache on the disk."""

from __future__ import annotations

import gc
import hashlib
import html
import json
import logging
import re
from pathlib import Path

import sentencepiece
import torch
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from ..control import Control
from ..errors import FlashGRPOError
from ..files import TensorFile, open_tensors, save_tensors, sha256_file, write_text_atomic
from .detect import kind_of
from .storage import StoredLinear
from .weights import Weights, component_folder, fill, finish, name_map

log = logging.getLogger(__name__)

EOS = 1
TOKENIZER = "spiece_model"  # tensor of ComfyUI's files that holds the tokenizer's bytes
_TIED = "encoder.embed_tokens.weight"
ROOM = 1.1  # free memory of a GPU that takes the whole encoder, as a multiple of its weights
_ATTENTION = "encoder.block.{}.layer.0.SelfAttention.{}.weight"
_ADVICE = (
    "choose umt5_xxl_fp8_e4m3fn_scaled.safetensors or umt5_xxl_fp16.safetensors from ComfyUI's "
    "text_encoders folder"
)


def clean_prompt(text: str) -> str:
    """Prompt text as Wan cleans it: HTML entities resolved (twice), white space collapsed."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


class TextEncoder:
    """UMT5 encoder with its tokenizer. Made by `load_text_encoder`.

    Attributes:
        model: the `UMT5EncoderModel`, frozen.
        sha256: hash of the files it was loaded from, hex.
    """

    def __init__(
        self, model: nn.Module, tokenizer: sentencepiece.SentencePieceProcessor, sha256: str
    ) -> None:
        self.model = model
        self.sha256 = sha256
        self._tokenizer = tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a prompt, cleaned, with the end token and without padding."""
        return [*self._tokenizer.encode(clean_prompt(text)), EOS]

    @torch.no_grad()
    def embed(self, text: str, tokens: int) -> torch.Tensor:
        """Embedding of one prompt without padding, fp32 `[n <= tokens, text_dim]` on the CPU.

        Prompts are never batched: nothing is masked, and an embedding does not depend on which
        other prompts are encoded with it.
        """
        ids = self.tokenize(text)
        if len(ids) > tokens:
            log.warning(
                "prompt of %d tokens is cut to %d: %.60s; shorten it or raise model.text_tokens",
                len(ids),
                tokens,
                text,
            )
            ids = [*ids[: tokens - 1], EOS]
        device = next(self.model.parameters()).device
        output = self.model(input_ids=torch.tensor([ids], device=device))
        return output.last_hidden_state[0].float().cpu()

    def encode(self, texts: list[str], tokens: int) -> torch.Tensor:
        """Embeddings of prompts, zero-padded: fp32 `[N, tokens, text_dim]` on the CPU."""
        return torch.stack([_padded(self.embed(text, tokens), tokens) for text in texts])


def _padded(embedding: torch.Tensor, tokens: int) -> torch.Tensor:
    return nn.functional.pad(embedding, (0, 0, 0, tokens - embedding.shape[0]))


def encoder_config(file: TensorFile) -> UMT5Config:
    """Architecture of a UMT5 encoder from its tensor shapes.

    Raises:
        FlashGRPOError: another kind of file (named), T5 instead of UMT5.
    """
    if "token_embedding.weight" in file and "blocks.0.attn.q.weight" in file:
        raise FlashGRPOError(
            f"{file.path}: UMT5 in the original Wan layout (umt5-xxl-enc-*), which carries no "
            f"tokenizer; {_ADVICE}"
        )
    bias = _ATTENTION.format(0, "relative_attention_bias")
    needed = ("shared.weight", _ATTENTION.format(0, "q"), bias)
    if any(key not in file for key in needed):
        raise FlashGRPOError(
            f"{file.path}: this is {kind_of(file)}, not a UMT5 text encoder; {_ADVICE}"
        )
    blocks = {int(m[1]) for key in file.keys() if (m := re.match(r"encoder\.block\.(\d+)\.", key))}
    layers = max(blocks) + 1
    if layers > 1 and _ATTENTION.format(1, "relative_attention_bias") not in file:
        raise FlashGRPOError(f"{file.path}: this is T5, Wan needs UMT5; {_ADVICE}")
    up = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"
    if up not in file:
        raise FlashGRPOError(f"{file.path}: no gated feed-forward, so not UMT5; {_ADVICE}")
    vocabulary, width = file.shape("shared.weight")
    buckets, heads = file.shape(bias)
    return UMT5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=file.shape(_ATTENTION.format(0, "q"))[0] // heads,
        d_ff=file.shape(up)[0],
        num_layers=layers,
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )


def load_text_encoder(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    sha256: str | None = None,
    streamed: bool = False,
) -> TextEncoder:
    """Load the UMT5 text encoder.

    Args:
        path: ComfyUI's `umt5_xxl_*.safetensors` (the tokenizer is inside), or a Diffusers folder
            with the tokenizer's `spiece.model` in it or in `tokenizer` beside it.
        dtype: dtype of the weights.
        device: where they go.
        sha256: hash of the files when it is known, to spare reading them twice.
        streamed: the weights of its layers rest in main memory and are copied to the device while
            they compute, so that 2 GB of it are there and not 11; the numbers are the same.

    Raises:
        FlashGRPOError: another kind of file, no tokenizer, unknown or missing keys (listed).
    """
    file = open_tensors(component_folder(path, "text_encoder"))
    config = encoder_config(file)
    tokenizer = _load_tokenizer(file, config.vocab_size)
    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    weights = Weights(file, ignore=(TOKENIZER, _TIED))
    # In fp16 the last projection of the feed-forward overflows.
    islands = ("wo",) if dtype == torch.float16 else ()
    place = "cpu" if streamed else device
    fill(model, weights, name_map(weights, lambda name: name), dtype, place, islands, tied={_TIED})
    model.set_input_embeddings(model.shared)
    finish(model)
    if streamed:
        _stream(model, device)
    return TextEncoder(model, tokenizer, sha256 or encoder_sha256(path))


def _stream(model: nn.Module, device: torch.device | str) -> None:
    """Keep the weights of the linear layers in main memory, and move the rest to the device."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            weight = layer.weight.data
            stored = StoredLinear(weight, layer.bias, weight.dtype, swapped=True)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, stored.eval())
    model.to(device)


def _too_large(path: str | Path, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether a GPU has no room for the whole text encoder now."""
    device = torch.device(device)
    if device.type != "cuda":
        return False
    file = open_tensors(component_folder(path, "text_encoder"))
    count = sum(torch.Size(file.shape(key)).numel() for key in file.keys())
    return ROOM * count * dtype.itemsize > torch.cuda.mem_get_info(device)[0]


def _load_tokenizer(file: TensorFile, vocabulary: int) -> sentencepiece.SentencePieceProcessor:
    if TOKENIZER in file:
        proto = file.get(TOKENIZER).reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        found = _tokenizer_file(file.path)
        if found is None:
            raise FlashGRPOError(f"{file.path}: no tokenizer (spiece_model) inside; {_ADVICE}")
        proto = found.read_bytes()
    tokenizer = sentencepiece.SentencePieceProcessor()
    try:
        tokenizer.LoadFromSerializedProto(proto)
    except RuntimeError as exc:
        raise FlashGRPOError(
            f"{file.path}: the tokenizer inside is damaged ({exc}); download the file again"
        ) from exc
    if tokenizer.vocab_size() > vocabulary:
        raise FlashGRPOError(
            f"{file.path}: the tokenizer has {tokenizer.vocab_size()} words, the encoder "
            f"{vocabulary}; {_ADVICE}"
        )
    return tokenizer


def _tokenizer_file(path: Path) -> Path | None:
    folder = path if path.is_dir() else path.parent
    for candidate in (folder / "spiece.model", folder.parent / "tokenizer" / "spiece.model"):
        if candidate.is_file():
            return candidate
    return None


def encoder_sha256(path: str | Path, memo: Path | None = None) -> str:
    """Hash of a text encoder's files, tokenizer included, hex.

    Args:
        path: as for `load_text_encoder`.
        memo: JSON file that remembers hashes by path, size and modification time; hashing 11 GB
            takes a while.
    """
    file = open_tensors(component_folder(path, "text_encoder"))
    parts = list(file.files)
    if TOKENIZER not in file:
        tokenizer = _tokenizer_file(file.path)
        parts += [tokenizer] if tokenizer else []
    stamps = [f"{p.resolve()}|{p.stat().st_size}|{p.stat().st_mtime_ns}" for p in parts]
    stamp = hashlib.sha256("\n".join(stamps).encode("utf-8", "surrogatepass")).hexdigest()
    known: dict[str, str] = {}
    if memo is not None and memo.is_file():
        try:
            known = dict(json.loads(memo.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            log.warning("%s is damaged and will be written anew", memo)
    value = known.get(stamp)
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        value = hashlib.sha256("".join(sha256_file(p) for p in parts).encode()).hexdigest()
        if memo is not None:
            write_text_atomic(memo, json.dumps({**known, stamp: value}, indent=1, sort_keys=True))
    return value


def cached_embeddings(
    texts: list[str],
    encoder_path: str | Path,
    tokens: int,
    cache_dir: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    control: Control | None = None,
) -> dict[str, torch.Tensor]:
    """Embeddings of prompts, from the disk where they were computed before.

    The encoder is loaded only when something is missing and leaves memory before this returns.

    Args:
        texts: prompts; repetitions are computed once.
        encoder_path: as for `load_text_encoder`.
        tokens: length of the text context.
        cache_dir: folder of the cache; it may be deleted at any time.
        dtype: dtype of the encoder's weights.
        device: where the encoder runs.
        control: progress and cancel; phase `encode`.

    Returns:
        Prompt -> fp32 `[tokens, text_dim]` on the CPU, zero-padded.

    Raises:
        FlashGRPOError: as `load_text_encoder`; the cache cannot be written.
    """
    control = control or Control()
    folder = Path(cache_dir)
    content = encoder_sha256(encoder_path, folder / "encoders.json")
    found: dict[str, torch.Tensor] = {}
    missing: dict[str, Path] = {}
    for text in dict.fromkeys(texts):
        key = json.dumps([content, str(dtype), tokens, text])
        file = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"
        embedding = _cached(file, tokens)
        if embedding is None:
            missing[text] = file
        else:
            found[text] = _padded(embedding, tokens)
    if missing:
        control.phase("encode", len(missing))
        streamed = _too_large(encoder_path, dtype, device)
        encoder = load_text_encoder(encoder_path, dtype, device, content, streamed)
        try:
            control.bring(encoder.model)
            for text, file in missing.items():
                control.check()
                embedding = encoder.embed(text, tokens)
                save_tensors(file, {"embedding": embedding})
                found[text] = _padded(embedding, tokens)
                control.tick()
        finally:
            del encoder
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return {text: found[text] for text in dict.fromkeys(texts)}


def _cached(file: Path, tokens: int) -> torch.Tensor | None:
    if not file.is_file():
        return None
    try:
        embedding = open_tensors(file).get("embedding")
    except FlashGRPOError as exc:
        log.warning("cached embedding is damaged and will be computed anew: %s", exc)
        return None
    usable = embedding.ndim == 2 and 0 < embedding.shape[0] <= tokens
    return embedding if usable and bool(torch.isfinite(embedding).all()) else None
