"""Small models of every Wan family in ComfyUI's key layout, and a job that trains them.

Random weights, width 128, two blocks: the keys, shapes' roles and code paths of the real ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from PIL import Image
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from flashgrpo_core import embedded
from flashgrpo_core.files import save_tensors
from flashgrpo_core.wan import names
from flashgrpo_core.wan.vae import MEAN_22, STD_22

#: Family -> what differs from text-to-video, number of transformers.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "wan2.1-t2v": ({}, 1),
    "wan2.1-i2v": ({"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 128}, 1),
    "wan2.2-t2v-a14b": ({}, 2),
    "wan2.2-i2v-a14b": ({"in_channels": 36}, 2),
    "wan2.2-ti2v-5b": ({"in_channels": 48, "out_channels": 48}, 1),
}


def transformer(seed: int, **changes: Any) -> WanTransformer3DModel:
    """A random transformer whose every parameter matters."""
    settings = {"num_attention_heads": 1, "attention_head_dim": 128, "ffn_dim": 16, "num_layers": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = WanTransformer3DModel(**{**settings, "text_dim": 4096, **changes})
        for name, parameter in network.named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
            torch.nn.init.normal_(parameter, std=fan_in**-0.5)
            if "norm" in name and name.endswith("weight"):
                parameter.data += 1.0
    return network


def write_transformer(path: Path, seed: int, **changes: Any) -> Path:
    """Save a random transformer with ComfyUI's names."""
    state = transformer(seed, **changes).state_dict()
    tensors = {names.to_original(key) or key: value.contiguous() for key, value in state.items()}
    save_tensors(path, tensors)
    return path


def write_vae_22(folder: Path) -> Path:
    """A narrow 2.2 VAE (48 channels, 16x16 pixels) in a Diffusers folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        network = AutoencoderKLWan(
            base_dim=4,
            decoder_base_dim=8,
            z_dim=48,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
            latents_mean=list(MEAN_22),
            latents_std=list(STD_22),
        )
    network.save_pretrained(folder)
    return folder


def write_clip_vision(path: Path) -> Path:
    """A shallow CLIP vision model of the width that Wan 2.1 image-to-video attends to."""
    config = CLIPVisionConfig(
        hidden_size=1280,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=16,
        image_size=28,
        patch_size=14,
        projection_dim=16,
        hidden_act="gelu",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        state = CLIPVisionModelWithProjection(config).state_dict()
    tensors = {
        key if key.startswith(("vision_model.", "visual_projection.")) else f"vision_model.{key}": t
        for key, t in state.items()
        if not key.endswith("position_ids")
    }
    save_tensors(path, {key: tensor.contiguous() for key, tensor in tensors.items()})
    return path


def write_image(path: Path, seed: int, size: tuple[int, int] = (96, 64)) -> Path:
    """A picture of coarse random colours."""
    draw = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), np.uint8)
    Image.fromarray(draw).resize(size, Image.Resampling.BICUBIC).save(path)
    return path


def write_prompts(path: Path, images: bool) -> Path:
    """Six prompts, with start images or without."""
    lines = []
    for i in range(6):
        record: dict[str, Any] = {"prompt": f"ball {i} rolls left"}
        if images:
            write_image(path.parent / f"start_{i % 2}.png", i % 2)
            record["image"] = f"start_{i % 2}.png"
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def job(folder: Path, family: str, **tables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Write the files of a family into `folder`; returns the tables of a two-iteration run."""
    changes, count = FAMILIES[family]
    marks = ["high_noise", "low_noise"] if count == 2 else [""]
    files = [
        write_transformer(folder / f"{family}{mark and '_'}{mark}.safetensors", seed, **changes)
        for seed, mark in enumerate(marks)
    ]
    model: dict[str, Any] = {
        "transformer": str(files[0]),
        "transformer_low": str(files[1]) if count == 2 else "",
        "vae": str(embedded.TINY_VAE),
        "text_encoder": str(embedded.TINY_TEXT_ENCODER),
        "text_tokens": 0 if family == "wan2.1-i2v" else 32,
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "gradient_checkpointing": False,
        "lora_targets": ["attention", "ffn"],
    }
    if family == "wan2.1-i2v":
        model["clip_vision"] = str(write_clip_vision(folder / "clip_vision.safetensors"))
        model["lora_targets"] = ["attention", "add_k_proj", "add_v_proj"]
    if family == "wan2.2-ti2v-5b":
        model["vae"] = str(write_vae_22(folder / "vae"))
    images = "i2v" in family
    side = 64 if family == "wan2.2-ti2v-5b" else 32
    merged: dict[str, dict[str, Any]] = {
        "model": model,
        "prompts": {"file": str(write_prompts(folder / "prompts.jsonl", images))},
        "schedule": {"steps": 8, "shift": 5.0},
        "rollout": {
            "width": side,
            "height": side,
            "frames": 5,
            "fps": 8.0,
            "guidance": 1.5,
            "group_size": 2,
            "prompts_per_iteration": 4,
            "micro_batch": 2,
        },
        "reward": {"terms": [{"name": "technical"}]},
        "optim": {"learning_rate": 1e-3, "warmup": 0},
        "eval": {"every": 0, "test_prompts": 1, "test_seeds": 1},
        "run": {"name": "family", "output": str(folder), "iterations": 2, "seed": 1, "threads": 1},
    }
    for table, values in tables.items():
        merged.setdefault(table, {}).update(values)
    return merged
