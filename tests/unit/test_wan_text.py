"""Prompt embeddings: the encoder against transformers, the tokenizer inside the file, the cache."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import UMT5Config, UMT5EncoderModel

from flashgrpo_core.control import Control
from flashgrpo_core.errors import Cancelled, FlashGRPOError
from flashgrpo_core.files import save_tensors
from flashgrpo_core.wan import text as wan_text
from flashgrpo_core.wan.lora import describe
from flashgrpo_core.wan.text import cached_embeddings, clean_prompt, load_text_encoder

PROMPTS = ["a red ball rolls left", "the green cat jumps", "a blue cube falls down"]
TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROMPTS * 20),
        model_writer=buffer,
        vocab_size=30,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return buffer.getvalue()


@pytest.fixture(scope="module")
def reference() -> UMT5EncoderModel:
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=40,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    model = UMT5EncoderModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1 if parameter.ndim == 1 else 0.0, std=0.5)
    return model.requires_grad_(False)


def comfy(model: UMT5EncoderModel, tokenizer: bytes) -> dict[str, torch.Tensor]:
    state = {k: v for k, v in model.state_dict().items() if k != "encoder.embed_tokens.weight"}
    state["spiece_model"] = torch.frombuffer(bytearray(tokenizer), dtype=torch.uint8)
    return state


@pytest.fixture()
def path(tmp_path, reference, tokenizer) -> Path:
    file = tmp_path / "umt5.safetensors"
    save_tensors(file, comfy(reference, tokenizer))
    return file


@torch.no_grad()
def expected(model: UMT5EncoderModel, ids: list[int], tokens: int) -> torch.Tensor:
    """What transformers gives for padded and masked ids, padding zeroed: Wan's own recipe."""
    padded = torch.tensor([ids + [0] * (tokens - len(ids))])
    mask = (torch.arange(tokens) < len(ids))[None].long()
    return (model(padded, attention_mask=mask).last_hidden_state * mask[..., None])[0]


# ------------------------------------------------------------------------------------ encoder


def test_equals_transformers_with_padding_and_mask(path, reference, tokenizer) -> None:
    encoder = load_text_encoder(path, torch.float32)
    raw = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    embeddings = encoder.encode(PROMPTS, TOKENS)
    assert embeddings.shape == (3, TOKENS, 32) and embeddings.dtype == torch.float32
    for prompt, embedding in zip(PROMPTS, embeddings, strict=True):
        ids = encoder.tokenize(prompt)
        assert ids == [*raw.encode(prompt), 1]
        assert torch.allclose(embedding, expected(reference, ids, TOKENS), atol=2e-5)
        assert torch.all(embedding[len(ids) :] == 0) and torch.all(embedding[: len(ids)] != 0)


def test_an_embedding_does_not_depend_on_its_company(path) -> None:
    encoder = load_text_encoder(path, torch.float32)
    together = encoder.encode(PROMPTS, TOKENS)
    for prompt, embedding in zip(PROMPTS, together, strict=True):
        assert torch.equal(encoder.encode([prompt], TOKENS)[0], embedding)


def test_long_prompts_keep_the_end_token_and_say_so(path, reference, caplog) -> None:
    encoder = load_text_encoder(path, torch.float32)
    ids = encoder.tokenize(PROMPTS[0])
    assert len(ids) > 8
    embedding = encoder.encode([PROMPTS[0]], 8)[0]
    assert torch.allclose(embedding, expected(reference, [*ids[:7], 1], 8), atol=2e-5)
    assert f"prompt of {len(ids)} tokens is cut to 8" in caplog.text


def test_prompts_are_cleaned(path) -> None:
    assert clean_prompt("  a\n\tred &amp;amp; ball  ") == "a red & ball"
    encoder = load_text_encoder(path, torch.float32)
    assert encoder.tokenize(" a  red\nball ") == encoder.tokenize("a red ball")
    assert encoder.tokenize("") == [1]
    assert torch.all(encoder.encode([""], 4)[0, 1:] == 0)


def test_16_bit_and_scaled_8_bit(tmp_path, reference, tokenizer) -> None:
    state = comfy(reference, tokenizer)
    wanted = None
    for dtype, bound in ((torch.float32, 0.0), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        save_tensors(tmp_path / "x.safetensors", state)
        encoder = load_text_encoder(tmp_path / "x.safetensors", dtype)
        got = encoder.encode(PROMPTS, TOKENS)
        wanted = got if wanted is None else wanted
        assert (got - wanted).norm() <= bound * wanted.norm()
        dtypes = {
            name.endswith("wo.weight"): p.dtype for name, p in encoder.model.named_parameters()
        }
        assert dtypes == {False: dtype, True: torch.float32 if bound == 0.02 else dtype}
    scaled, exact = {}, {}
    for key, value in state.items():
        if value.ndim == 2 and "encoder.block" in key and "bias" not in key:
            scale = value.abs().max() / 448
            scaled[key] = (value / scale).to(torch.float8_e4m3fn)
            scaled[key.replace(".weight", ".scale_weight")] = scale
            exact[key] = scaled[key].float() * scale
        else:
            scaled[key] = exact[key] = value
    scaled["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    save_tensors(tmp_path / "8.safetensors", scaled)
    encoder = load_text_encoder(tmp_path / "8.safetensors", torch.float32)
    loaded = encoder.model.state_dict()
    assert all(torch.equal(loaded[k], v) for k, v in exact.items() if k != "spiece_model")
    assert describe(tmp_path / "8.safetensors")["quantisation"] == "fp8_scaled"


def test_diffusers_folder_with_the_tokenizer_beside_it(tmp_path, reference, tokenizer) -> None:
    reference.save_pretrained(tmp_path / "text_encoder")
    with pytest.raises(FlashGRPOError, match="no tokenizer .*umt5_xxl_fp16"):
        load_text_encoder(tmp_path / "text_encoder", torch.float32)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "spiece.model").write_bytes(tokenizer)
    (tmp_path / "model_index.json").write_text("{}")
    for path in (tmp_path, tmp_path / "text_encoder"):
        encoder = load_text_encoder(path, torch.float32)
        ids = encoder.tokenize(PROMPTS[0])
        got = encoder.encode(PROMPTS[:1], TOKENS)[0]
        assert torch.allclose(got, expected(reference, ids, TOKENS), atol=2e-5)


def test_wrong_files_are_named(tmp_path, reference, tokenizer) -> None:
    path = tmp_path / "x.safetensors"
    state = comfy(reference, tokenizer)
    bias = "relative_attention_bias"
    cases = {
        "original Wan layout .*umt5-xxl-enc.*umt5_xxl_fp16": {
            "token_embedding.weight": torch.ones(2, 2),
            "blocks.0.attn.q.weight": torch.ones(2, 2),
        },
        "this is T5, Wan needs UMT5": {
            k: v for k, v in state.items() if bias not in k or ".block.0." in k
        },
        "this is a CLIP text encoder": {"text_model.encoder.layers.0.x": torch.ones(1)},
        "no tokenizer": {k: v for k, v in state.items() if k != "spiece_model"},
        "tokenizer inside is damaged": {**state, "spiece_model": torch.ones(9, dtype=torch.uint8)},
        "missing: encoder.final_layer_norm.weight": {
            k: v for k, v in state.items() if "final" not in k
        },
        "unknown: decoder.x": {**state, "decoder.x": torch.ones(1)},
        "tokenizer has 30 words, the encoder 20": {
            **state,
            "shared.weight": state["shared.weight"][:20],
        },
    }
    for message, tensors in cases.items():
        save_tensors(path, tensors)
        with pytest.raises(FlashGRPOError, match=message):
            load_text_encoder(path, torch.float32)


def test_describe(path, reference) -> None:
    facts = describe(path)
    assert (facts["kind"], facts["dtype"]) == ("text_encoder", "fp32")
    assert facts["architecture"]["num_layers"] == 3
    assert facts["architecture"]["tokenizer_inside"] is True
    assert facts["parameters"] == sum(p.numel() for p in reference.parameters())


# --------------------------------------------------------------------------------------- cache


class Watching(Control):
    """Counts what the host sees; can cancel at the n-th check."""

    def __init__(self, cancel_at: int = 0) -> None:
        self.seen: list[tuple] = []
        self.cancel_at = cancel_at

    def phase(self, name: str, total: int, iteration: int = 0) -> None:
        self.seen.append((name, total))

    def tick(self, done: int = 1) -> None:
        self.seen.append(("tick", done))

    def check(self) -> None:
        self.cancel_at -= 1
        if self.cancel_at == 0:
            raise Cancelled

    def bring(self, network: torch.nn.Module) -> None:
        self.seen.append(("bring", type(network).__name__))


def embed(path: Path, cache: Path, texts=PROMPTS, tokens=TOKENS, dtype=torch.float32, control=None):
    return cached_embeddings(texts, path, tokens, cache, dtype, "cpu", control)


def test_the_second_time_nothing_is_loaded(tmp_path, path, monkeypatch) -> None:
    cache, control = tmp_path / "cache", Watching()
    encoder = load_text_encoder(path, torch.float32)
    first = embed(path, cache, [*PROMPTS, PROMPTS[0]], control=control)
    assert control.seen[:2] == [("encode", 3), ("bring", "UMT5EncoderModel")]
    assert control.seen[2:] == [("tick", 1)] * 3
    wanted = encoder.encode(PROMPTS, TOKENS)
    assert all(torch.equal(first[p], w) for p, w in zip(PROMPTS, wanted, strict=True))

    def must_not_run(*args, **kwargs):
        raise AssertionError("the encoder was loaded or hashed although everything is cached")

    monkeypatch.setattr(wan_text, "load_text_encoder", must_not_run)
    monkeypatch.setattr(wan_text, "sha256_file", must_not_run)
    second = embed(path, cache, PROMPTS[::-1])
    assert list(second) == PROMPTS[::-1]
    assert all(torch.equal(second[p], first[p]) for p in PROMPTS)


def test_what_is_in_the_key(tmp_path, path, reference, tokenizer, monkeypatch) -> None:
    """Prompt, length, dtype and the encoder's content; not its path."""
    cache = tmp_path / "cache"
    embed(path, cache)
    loads = []
    real = wan_text.load_text_encoder
    monkeypatch.setattr(
        wan_text, "load_text_encoder", lambda *a, **k: loads.append(a) or real(*a, **k)
    )
    moved = tmp_path / "elsewhere" / "encoder.safetensors"
    moved.parent.mkdir()
    shutil.copy(path, moved)
    embed(moved, cache)
    assert loads == []
    embed(path, cache, tokens=16)
    embed(path, cache, dtype=torch.bfloat16)
    embed(path, cache, texts=[PROMPTS[0], "a new prompt"])
    state = comfy(reference, tokenizer)
    save_tensors(moved, {**state, "shared.weight": state["shared.weight"] * 2})
    changed = embed(moved, cache)
    assert len(loads) == 4
    assert not torch.equal(changed[PROMPTS[0]], embed(path, cache)[PROMPTS[0]])


def test_damaged_cache_files_are_made_anew(tmp_path, path, caplog) -> None:
    cache = tmp_path / "cache"
    first = embed(path, cache)
    files = sorted(cache.glob("*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:40])
    save_tensors(files[1], {"embedding": torch.full((3, 32), float("nan"))})
    (cache / "encoders.json").write_text("[")
    again = embed(path, cache)
    assert all(torch.equal(first[p], again[p]) for p in PROMPTS)
    assert "cached embedding is damaged" in caplog.text and "will be written anew" in caplog.text
    json.loads((cache / "encoders.json").read_text())


def test_cancel_keeps_what_was_computed(tmp_path, path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(Cancelled):
        embed(path, cache, control=Watching(cancel_at=3))
    assert len(list(cache.glob("*.safetensors"))) == 2
    control = Watching()
    embed(path, cache, control=control)
    assert control.seen[0] == ("encode", 1)


def test_cached_files_hold_no_padding(tmp_path, path) -> None:
    cache = tmp_path / "cache"
    embed(path, cache, [PROMPTS[0]], tokens=512)
    (file,) = cache.glob("*.safetensors")
    assert file.stat().st_size < 32 * 4 * 40
