"""The text part is computed for the distinct rows only, and everything comes out the same."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel

from flashgrpo_core.conditioning import StartImage
from flashgrpo_core.policy import WanPolicy
from tests.unit._tiny import (  # noqa: F401
    SHAPE,
    TEXT_DIM,
    embedding,
    one_thread,
    perturb,
    tiny_policy,
    tiny_transformer,
)
from tests.unit._train import relative_difference


def image_policy() -> WanPolicy:
    """An image-to-video network: CLIP tokens before the text, mask and start video as channels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=1, attention_head_dim=128, in_channels=36,
            out_channels=16, text_dim=TEXT_DIM, freq_dim=32, ffn_dim=64, num_layers=1,
            rope_max_seq_len=64, image_dim=24, added_kv_proj_dim=128,
        ).eval()  # fmt: skip
    policy = WanPolicy(network, rank=4, alpha=8.0, targets=["attention"], seed=0)
    perturb(policy, 0.1)
    return policy


def plain(policy: WanPolicy, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The library's own way: every video brings its text."""
    return policy.transformer(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_velocity_and_gradient_are_those_of_a_text_for_every_video(checkpointing: bool) -> None:
    policy = tiny_policy(moved=0.1, checkpointing=checkpointing)
    latents, context = torch.randn(4, *SHAPE), embedding("a")
    inputs = {
        "hidden_states": latents,
        "timestep": torch.full((4,), 500.0),
        "encoder_hidden_states": context.repeat(4, 1, 1),
    }
    gradients = []
    shared = policy.velocity(latents, 500.0, context)
    for out in (shared, plain(policy, inputs)):
        torch.testing.assert_close(out, shared, rtol=0, atol=1e-5)
        out.square().mean().backward()
        gradients.append({n: p.grad for n, p in policy.parameters().items()})
        for p in policy.parameters().values():
            p.grad = None
    assert relative_difference(*gradients) < 1e-5


def test_two_texts_go_to_the_halves_of_a_batch() -> None:
    policy = tiny_policy(moved=0.1)
    latents, texts = torch.randn(4, *SHAPE), torch.stack([embedding("a"), embedding("b")])
    inputs = {"hidden_states": latents, "timestep": torch.full((4,), 500.0)}
    with torch.no_grad():
        got = plain(policy, {**inputs, "encoder_hidden_states": texts})
        every = texts.repeat_interleave(2, 0)
        wanted = plain(policy, {**inputs, "encoder_hidden_states": every})
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(got[0], got[2], atol=1e-3)


def test_the_tokens_of_a_start_image_are_shared_too() -> None:
    policy = image_policy()
    latents, context = torch.randn(3, *SHAPE), torch.randn(512, TEXT_DIM)
    image = StartImage(torch.randn(20, *SHAPE[1:]), torch.randn(257, 24))
    inputs = {
        "hidden_states": torch.cat([latents, image.channels.expand(3, -1, -1, -1, -1)], 1),
        "timestep": torch.full((3,), 500.0),
        "encoder_hidden_states": context.repeat(3, 1, 1),
        "encoder_hidden_states_image": image.tokens.repeat(3, 1, 1),
    }
    with torch.no_grad():
        got = policy.velocity(latents, 500.0, context, image=image)
        torch.testing.assert_close(got, plain(policy, inputs), rtol=0, atol=1e-5)


def test_text_layers_see_one_row() -> None:
    policy = tiny_policy()
    rows: list[int] = []
    block = policy.transformer.blocks[0]
    for module in (policy.transformer.condition_embedder.text_embedder, block.attn2.to_k):
        module.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    with torch.no_grad():
        policy.velocity(torch.randn(8, *SHAPE), 500.0, embedding("a"))
    assert rows == [1, 1]
