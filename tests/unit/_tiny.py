"""A random tiny Wan (not the embedded one) and the things that are needed to sample from it.

Its weights are random, so its videos mean nothing; but the network, the LoRA, guidance and the
schedule are the real ones, and a forward takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from diffusers import WanTransformer3DModel

from flashgrpo_core.groups import PromptGroup, make_groups
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.rollout import Rollout, RolloutSampler, RolloutSettings, sample_shares
from flashgrpo_core.schedule import Schedule, make_schedule
from flashgrpo_core.seeds import generator

#: `(C, T, H, W)` of one video's latents: 8 transformer tokens.
SHAPE = (16, 2, 4, 4)
TEXT_TOKENS = 5
TEXT_DIM = 32
PROMPTS = ("a red ball rolls left", "a blue box jumps", "snow falls on a quiet lake")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny network is faster on one thread, much faster on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_transformer(seed: int = 0) -> WanTransformer3DModel:
    """A Wan transformer of width 128 (one head) and two layers with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=1,
            attention_head_dim=128,
            in_channels=SHAPE[0],
            out_channels=SHAPE[0],
            text_dim=TEXT_DIM,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=64,
        )
    return network.eval()


def perturb(policy: WanPolicy, scale: float, seed: int = 0) -> None:
    """Add seeded normal noise of standard deviation `scale` to every trained tensor."""
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            noise = torch.randn(parameter.shape, generator=generator(seed, name, "perturb"))
            parameter.add_(scale * noise)


def tiny_policy(
    seed: int = 0,
    *,
    moved: float = 0.0,
    targets: list[str] | None = None,
    checkpointing: bool = False,
) -> WanPolicy:
    """A policy on `tiny_transformer`; `moved` takes its LoRA off zero."""
    policy = WanPolicy(
        tiny_transformer(seed),
        rank=4,
        alpha=8.0,
        targets=targets,
        seed=seed,
        gradient_checkpointing=checkpointing,
    )
    if moved:
        perturb(policy, moved, seed + 1)
    return policy


def embedding(prompt: str) -> torch.Tensor:
    """A random but fixed prompt embedding `[tokens, text_dim]`."""
    return torch.randn(TEXT_TOKENS, TEXT_DIM, generator=generator(prompt, "embedding"))


def tiny_sampler(
    policy: WanPolicy,
    schedule: Schedule | None = None,
    *,
    guidance: float = 1.0,
    kind: str = "flash",
    eta: float = 1.0,
    shared_prefix: bool = True,
    micro_batch: int = 4,
) -> RolloutSampler:
    """A sampler over four steps of ComfyUI's `simple` schedule, shift 3, unless told otherwise."""
    settings = RolloutSettings(SHAPE, guidance, kind, eta, shared_prefix, micro_batch)
    negative = None if guidance == 1.0 else embedding("negative")
    schedule = schedule or make_schedule("simple", 4, 3.0)
    return RolloutSampler(policy, schedule, settings, embedding, negative)


def tiny_groups(
    count: int = 3,
    *,
    size: int = 4,
    noise: str = "shared",
    window: tuple[int, int] = (0, 3),
    iteration: int = 1,
) -> list[PromptGroup]:
    """Groups of the first `count` prompts."""
    return make_groups(
        PROMPTS[:count],
        iteration=iteration,
        run_seed=5,
        group_size=size,
        window=window,
        noise=noise,
    )


def sample_all(sampler: RolloutSampler, groups: list[PromptGroup]) -> list[Rollout]:
    """All rollouts of all groups, as the trainer makes them on one process."""
    sampler.forget()
    shares = sample_shares(groups, sampler.settings.micro_batch)
    rollouts = [sampler.sample(groups[g], samples) for g, samples in shares]
    sampler.forget()
    return rollouts
