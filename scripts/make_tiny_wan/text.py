"""The tiny UMT5 encoder: random frozen weights, a sentencepiece tokenizer trained on captions.

The encoder is not trained: with well-scaled random weights different words already get clearly
different embeddings, mixed a little with their context, and the video model learns to read them.
"""

from __future__ import annotations

import io
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import load_file
from transformers import UMT5Config, UMT5EncoderModel

from flashgrpo_core import tiny_world

TEXT_TOKENS = 32
WIDTH, HEAD_SIZE, HEADS, FEED_FORWARD, LAYERS = 4096, 16, 2, 32, 2
VOCABULARY = 320
BUCKETS = 32


def train_tokenizer() -> bytes:
    """A unigram model with byte fallback; ids: 0 padding, 1 end of text, 2 unknown."""
    captions = tiny_world.all_prompts()
    # The trainer only considers pieces seen in two different words; with a comma behind it, each
    # word is seen twice and becomes one piece.
    listed = [caption.replace(" ", ", ") + "," for caption in captions]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(captions * 3 + listed),
        model_writer=model,
        model_type="unigram",
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def make_tensors(seed: int) -> dict[str, torch.Tensor]:
    """All tensors of the text encoder file, Hugging Face key names plus ``spiece_model``."""
    spiece = train_tokenizer()
    vocabulary = sentencepiece.SentencePieceProcessor(model_proto=spiece).vocab_size()
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    inner = HEADS * HEAD_SIZE
    tensors = {
        "shared.weight": normal(vocabulary, WIDTH, 1.0),
        "encoder.final_layer_norm.weight": torch.ones(WIDTH),
    }
    for n in range(LAYERS):
        attention = f"encoder.block.{n}.layer.0.SelfAttention"
        dense = f"encoder.block.{n}.layer.1.DenseReluDense"
        fan_in = WIDTH**-0.5  # inputs have unit variance: so have the outputs
        tensors |= {
            # T5 does not divide the logits by sqrt(head size): the query carries that.
            f"{attention}.q.weight": normal(inner, WIDTH, fan_in * HEAD_SIZE**-0.5),
            f"{attention}.k.weight": normal(inner, WIDTH, fan_in),
            f"{attention}.v.weight": normal(inner, WIDTH, fan_in),
            f"{attention}.o.weight": normal(WIDTH, inner, 0.4 * inner**-0.5),
            f"{attention}.relative_attention_bias.weight": normal(BUCKETS, HEADS, 0.5),
            f"encoder.block.{n}.layer.0.layer_norm.weight": torch.ones(WIDTH),
            f"{dense}.wi_0.weight": normal(FEED_FORWARD, WIDTH, fan_in),
            f"{dense}.wi_1.weight": normal(FEED_FORWARD, WIDTH, fan_in),
            f"{dense}.wo.weight": normal(WIDTH, FEED_FORWARD, 0.4 * FEED_FORWARD**-0.5),
            f"encoder.block.{n}.layer.1.layer_norm.weight": torch.ones(WIDTH),
        }
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    tensors["spiece_model"] = torch.frombuffer(bytearray(spiece), dtype=torch.uint8)
    return tensors


def load(path: Path) -> tuple[UMT5EncoderModel, sentencepiece.SentencePieceProcessor]:
    """Load the file with a configuration read from the tensor shapes alone."""
    tensors = load_file(path)
    tokenizer = sentencepiece.SentencePieceProcessor(
        model_proto=tensors.pop("spiece_model").numpy().tobytes()
    )
    block = "encoder.block.0.layer"
    heads = tensors[f"{block}.0.SelfAttention.relative_attention_bias.weight"].shape[1]
    config = UMT5Config(
        vocab_size=tensors["shared.weight"].shape[0],
        d_model=tensors["shared.weight"].shape[1],
        d_kv=tensors[f"{block}.0.SelfAttention.q.weight"].shape[0] // heads,
        d_ff=tensors[f"{block}.1.DenseReluDense.wi_0.weight"].shape[0],
        num_layers=1 + max(int(k.split(".")[2]) for k in tensors if ".block." in k),
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    model = UMT5EncoderModel(config)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]  # tied
    model.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=True)
    return model.eval().requires_grad_(False), tokenizer


@torch.no_grad()
def embed(path: Path, prompts: list[str]) -> torch.Tensor:
    """Embeddings [N, 32, 4096], zero behind the end-of-text token, as Wan pads its prompts."""
    model, tokenizer = load(path)
    out = torch.zeros(len(prompts), TEXT_TOKENS, model.config.d_model)
    for row, prompt in enumerate(prompts):
        ids = [*tokenizer.encode(prompt)[: TEXT_TOKENS - 1], tokenizer.eos_id()]
        out[row, : len(ids)] = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return out
