"""Small random models of the rewards' architectures, on disk in the layouts of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PROMPTS = ("a red circle moving right", "snow falls on a quiet lake, at night")


def clip(count: int, height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """Frames uint8 `[T, H, W, 3]` of coloured shapes and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    frames = []
    for t in range(count):
        frame = rng.integers(0, 60, (height, width, 3))
        inside = np.hypot(x - 10 - 3 * t, y - height / 2) < height / 4
        frame[inside] = rng.integers(90, 256, 3)
        frames.append(frame)
    return np.stack(frames).astype(np.uint8)


def spread(network: torch.nn.Module, seed: int = 0) -> None:
    """Random weights that are large enough to make a difference."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (0.9 / parameter.shape[-1] ** 0.5))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))


# --- CLIP ---------------------------------------------------------------------------------------


def write_clip_tokenizer(folder: Path) -> int:
    """vocab.json and merges.txt in CLIP's layout; returns the number of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("r", "e"), ("re", "d</w>"), ("l", "a"), ("q", "u")]
    words = [*letters, *(letter + "</w>" for letter in letters), *("".join(m) for m in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}), encoding="utf-8"
    )
    return len(vocabulary)


def clip_settings(vocabulary: int, act: str = "quick_gelu", **vision: Any) -> dict[str, Any]:
    """config.json of a small CLIP."""
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": act,
        "projection_dim": 24,
    }
    return {
        "model_type": "clip",
        "projection_dim": 24,
        "logit_scale_init_value": 2.0,
        "vision_config": {**tower, "image_size": 28, "patch_size": 7, **vision},
        "text_config": {
            **tower,
            "vocab_size": vocabulary,
            "max_position_embeddings": 77,
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
        },
    }


def write_clip(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """A Hugging Face folder with a small random CLIP."""
    from transformers import CLIPConfig, CLIPModel

    vocabulary = write_clip_tokenizer(folder)
    described = clip_settings(vocabulary, **settings)
    network = CLIPModel(CLIPConfig.from_dict(described)).eval()
    spread(network, seed)
    with torch.no_grad():
        network.logit_scale.fill_(3.1)
    network.save_pretrained(folder, safe_serialization=True)
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


# --- Qwen2-VL -----------------------------------------------------------------------------------

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def write_qwen_base(folder: Path, corpus: list[str]) -> dict[str, Any]:
    """config.json (as published: flat) and tokenizer.json of a small Qwen2-VL."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    settings = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        # The base has more embeddings than tokens, as the published ones do.
        "vocab_size": size + 40,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "mlp_ratio": 2,
            "num_heads": 2,
            "in_chans": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return settings


def random_qwen(settings: dict[str, Any], tokens: int, seed: int = 0) -> Any:
    """`Qwen2VLForConditionalGeneration` with random weights and `tokens` embeddings."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    network = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_dict(settings)).eval()
    network.resize_token_embeddings(tokens)
    spread(network, seed)
    return network


def published_names(network: Any) -> dict[str, torch.Tensor]:
    """Its weights under the names of transformers 4.45, with which the rewards were trained."""
    found = {}
    for name, tensor in network.state_dict().items():
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        found[name] = tensor.clone().contiguous()
    return found


def write_hpsv3(folder: Path, text: str) -> tuple[Any, torch.nn.Module]:
    """HPSv3's folder; returns the network and the head for the reference."""
    settings = write_qwen_base(folder, [text, *PROMPTS])
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() + 1
    network = random_qwen(settings, tokens)
    head = torch.nn.Sequential(
        torch.nn.Linear(32, 1024),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.05),
        torch.nn.Linear(1024, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 2),
    ).eval()
    spread(head, 3)
    tensors = published_names(network)
    tensors |= {f"rm_head.{name}": t.clone() for name, t in head.state_dict().items()}
    save_file(tensors, folder / "HPSv3.safetensors")
    return network, head
