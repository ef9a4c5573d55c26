"""The embedded tiny Wan: a real, trained model small enough to ship, used by demo and tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config

TINY = "tiny"
TINY_FOLDER = Path(__file__).resolve().parent / "assets" / "tiny_wan"
TINY_TRANSFORMER = TINY_FOLDER / "tiny_wan_t2v.safetensors"
TINY_VAE = TINY_FOLDER / "tiny_wan_vae.safetensors"
TINY_TEXT_ENCODER = TINY_FOLDER / "tiny_wan_umt5.safetensors"
TINY_PROMPTS = {
    part: TINY_FOLDER / f"prompts_{part}.txt" for part in ("train", "validation", "test")
}

#: Text context the tiny model was trained with; padding to 512 would cost five times as much.
TINY_TEXT_TOKENS = 32
#: Text context of the real Wan models.
TEXT_TOKENS = 512


def demo_tables(iterations: int = 45, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Configuration tables of `flashgrpo demo`; everything else comes from the tiny defaults."""
    return {
        "model": {"transformer": TINY},
        # A short run: a brisk learning rate, and an average that does not lag far behind.
        "optim": {"learning_rate": 1e-3, "warmup": 3, "ema_decay": 0.8},
        "eval": {"every": 15, "prompts": 12, "seeds": 2, "test_prompts": 12, "test_seeds": 4},
        "run": {"name": "demo", "iterations": iterations, "seed": seed},
    }


def with_embedded_files(config: Config) -> Config:
    """Replace `tiny` by the embedded files, where the configuration leaves them open."""
    if config.model.transformer != TINY:
        return config
    model = replace(
        config.model,
        transformer=str(TINY_TRANSFORMER),
        vae=config.model.vae or str(TINY_VAE),
        text_encoder=config.model.text_encoder or str(TINY_TEXT_ENCODER),
        text_tokens=config.model.text_tokens or TINY_TEXT_TOKENS,
    )
    prompts = config.prompts
    if not prompts.file:
        prompts = replace(
            prompts,
            file=str(TINY_PROMPTS["train"]),
            validation_file=prompts.validation_file or str(TINY_PROMPTS["validation"]),
            test_file=prompts.test_file or str(TINY_PROMPTS["test"]),
        )
    from .rewards.mix import default_terms

    reward = config.reward
    if not reward.terms:
        reward = replace(reward, terms=default_terms(tiny=True))
    return replace(config, model=model, prompts=prompts, reward=reward)
