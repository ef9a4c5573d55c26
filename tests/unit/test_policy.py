"""The policy: LoRA on a frozen Wan, its reference, and exact round trips of its weights."""

from __future__ import annotations

import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.policy import ADAPTER, WanPolicy, forwards_per_velocity
from tests.unit._tiny import (  # noqa: F401
    SHAPE,
    embedding,
    one_thread,
    perturb,
    tiny_policy,
    tiny_transformer,
)


def latents(batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn((batch, *SHAPE), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def velocity(policy: WanPolicy, guidance: float = 1.0, timestep: float = 700.0) -> torch.Tensor:
    return policy.velocity(latents(), timestep, embedding("a cat"), embedding("bad"), guidance)


@torch.no_grad()
def base_velocity(network: torch.nn.Module, prompt: str = "a cat") -> torch.Tensor:
    return network(
        hidden_states=latents(),
        timestep=torch.full((2,), 700.0),
        encoder_hidden_states=embedding(prompt).expand(2, -1, -1),
        return_dict=False,
    )[0]


# Which weights.


def test_attention_lora_by_name_and_shape() -> None:
    policy = tiny_policy()
    names = [
        f"blocks.{block}.{attention}.{part}"
        for block in range(2)
        for attention in ("attn1", "attn2")
        for part in ("to_k", "to_out.0", "to_q", "to_v")
    ]
    parameters = policy.parameters()
    assert list(parameters) == sorted(parameters)
    assert sorted(parameters) == sorted(
        f"{n}.{half}" for n in names for half in ("lora_A", "lora_B")
    )
    for name, parameter in parameters.items():
        assert parameter.shape == ((4, 128) if name.endswith("A") else (128, 4))
        assert parameter.requires_grad and parameter.dtype == torch.float32
    trained = [p for p in policy.transformer.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in parameters.values()}
    assert not policy.transformer.training


def test_ffn_and_name_endings_as_targets() -> None:
    assert len(tiny_policy(targets=["attention", "ffn"]).parameters()) == 2 * 2 * (8 + 2)
    policy = tiny_policy(targets=["attn1.to_q", "blocks.1.ffn.net.2"])
    assert policy.targets == [
        "blocks.0.attn1.to_q",
        "blocks.1.attn1.to_q",
        "blocks.1.ffn.net.2",
    ]
    assert policy.parameters()["blocks.1.ffn.net.2.lora_A"].shape == (4, 64)


@pytest.mark.parametrize("target", ["add_k_proj", "to_add_out", "attn1.to_z", "to_"])
def test_a_target_that_matches_nothing_is_an_error(target: str) -> None:
    """Names of image-to-video layers in a text-to-video model once trained nothing, silently."""
    with pytest.raises(FlashGRPOError, match=f"{target}.*matches no"):
        tiny_policy(targets=["attention", target])


def test_start_is_seeded_and_leaves_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    network = tiny_transformer()
    first = WanPolicy(network, rank=4, seed=3).snapshot()
    assert torch.equal(before, torch.get_rng_state()), "drawn from global state"
    torch.manual_seed(1234)
    again = WanPolicy(tiny_transformer(), rank=4, seed=3).snapshot()
    other = WanPolicy(tiny_transformer(), rank=4, seed=4).snapshot()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if name.endswith("lora_B"):
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, other[name])
            assert 0.2 < tensor.std() < 0.3  # 1 / rank
    a = {name: t for name, t in first.items() if name.endswith("to_q.lora_A")}
    assert len({t.sum().item() for t in a.values()}) == len(a), "modules share their noise"


# Reference.


def test_a_fresh_policy_and_its_reference_are_the_base_bit_for_bit() -> None:
    wanted = base_velocity(tiny_transformer())
    policy = tiny_policy()
    assert torch.equal(velocity(policy), wanted)
    perturb(policy, 0.3)
    assert (velocity(policy) - wanted).abs().max() > 1e-2, "the LoRA must change the output"
    with policy.reference():
        assert torch.equal(velocity(policy), wanted)
    assert (velocity(policy) - wanted).abs().max() > 1e-2, "the LoRA must be back"


def test_the_policy_stays_trainable_after_its_reference_was_used() -> None:
    policy = tiny_policy(moved=0.3)
    with policy.reference():
        velocity(policy)
    assert all(p.requires_grad for p in policy.parameters().values())
    policy.velocity(latents(), 700.0, embedding("a cat")).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in policy.parameters().values())


def test_the_reference_is_left_when_something_fails_inside() -> None:
    policy = tiny_policy(moved=0.3)
    moved = velocity(policy)
    with pytest.raises(RuntimeError, match="out of memory"), policy.reference():
        raise RuntimeError("out of memory")
    assert torch.equal(velocity(policy), moved)


def test_a_continued_lora_refers_to_its_starting_weights() -> None:
    policy = tiny_policy(moved=0.3)
    start, base = velocity(policy), velocity(tiny_policy())
    policy.set_reference(policy.snapshot())
    perturb(policy, 0.3, seed=9)
    live, weights = velocity(policy), policy.snapshot()
    assert (live - start).abs().max() > 1e-2
    with policy.reference():
        assert torch.equal(velocity(policy), start)
        assert not torch.equal(velocity(policy), base)
    assert torch.equal(velocity(policy), live)
    assert all(torch.equal(weights[n], t) for n, t in policy.snapshot().items())


def test_later_changes_do_not_reach_the_stored_reference() -> None:
    policy = tiny_policy(moved=0.3)
    start, weights = velocity(policy), policy.snapshot()
    policy.set_reference(weights)
    for tensor in weights.values():
        tensor.zero_()
    with policy.reference():
        assert torch.equal(velocity(policy), start)


# Loading.


def test_snapshots_are_copies_and_load_restores_the_same_bits() -> None:
    policy = tiny_policy(moved=0.3)
    before, weights = velocity(policy), policy.snapshot()
    perturb(policy, 0.3, seed=9)
    assert not torch.equal(velocity(policy), before)
    policy.load(weights)
    assert torch.equal(velocity(policy), before)
    other = tiny_policy(seed=0)
    other.load(weights)
    assert torch.equal(velocity(other), before)


def test_using_other_weights_is_undone_even_after_an_error() -> None:
    policy, other = tiny_policy(moved=0.3), tiny_policy(moved=0.5)
    mine, theirs, weights = velocity(policy), velocity(other), other.snapshot()
    with policy.using(weights):
        assert torch.equal(velocity(policy), theirs)
    assert torch.equal(velocity(policy), mine)
    with pytest.raises(RuntimeError, match="cancelled"), policy.using(weights):
        raise RuntimeError("cancelled")
    assert torch.equal(velocity(policy), mine)
    with policy.using(None):
        assert torch.equal(velocity(policy), mine)


@pytest.mark.parametrize("fault", ["missing", "unknown", "rank", "last shape"])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(fault: str) -> None:
    policy = tiny_policy(moved=0.3)
    before, weights = velocity(policy), tiny_policy(moved=0.5).snapshot()
    last = sorted(weights)[-1]
    if fault == "missing":
        del weights[last]
        named = f"1 tensors missing.*{last}"
    elif fault == "unknown":
        weights["blocks.7.attn1.to_q.lora_A"] = torch.zeros(4, 128)
        named = "1 unknown.*blocks.7"
    elif fault == "rank":
        weights = WanPolicy(tiny_transformer(), rank=8).snapshot()
        named = r"\(8, 128\).*\(4, 128\).*lora_rank"
    else:
        weights[last] = torch.zeros(128, 5)
        named = rf"{last} is \(128, 5\)"
    with pytest.raises(FlashGRPOError, match=named):
        policy.load(weights)
    assert torch.equal(velocity(policy), before)
    with pytest.raises(FlashGRPOError, match=named), policy.using(weights):
        raise AssertionError("must not be entered")
    assert torch.equal(velocity(policy), before)


def test_lora_pairs_reproduce_the_output_when_merged_by_hand() -> None:
    policy = tiny_policy(moved=0.3)
    network = tiny_transformer()
    pairs = policy.lora_pairs(policy.snapshot())
    assert sorted(pairs) == sorted(policy.targets)
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            network.get_submodule(name).weight += policy.alpha / policy.rank * b @ a
    torch.testing.assert_close(base_velocity(network), velocity(policy), rtol=1e-4, atol=1e-5)


# Numbers.


def test_lora_weights_are_fp32_on_a_bf16_base() -> None:
    network = tiny_transformer().to(torch.bfloat16)
    policy = WanPolicy(network, rank=4, alpha=8.0)
    assert policy.dtype == torch.bfloat16
    assert {p.dtype for p in policy.parameters().values()} == {torch.float32}
    base = velocity(policy)
    assert base.dtype == torch.float32
    perturb(policy, 0.3)
    assert (velocity(policy) - base).abs().max() > 1e-2
    with policy.reference():
        assert torch.equal(velocity(policy), base)
    policy.velocity(latents(), 700.0, embedding("a cat")).square().sum().backward()
    for name, parameter in policy.parameters().items():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().max() > 0, name


def test_weights_too_small_for_bf16_survive_on_a_bf16_base() -> None:
    """A step of 3e-5 on a weight near 1 is lost in bf16: trained weights must be fp32."""
    policy = WanPolicy(tiny_transformer().to(torch.bfloat16), rank=4)
    name, parameter = next(iter(policy.parameters().items()))
    with torch.no_grad():
        parameter.fill_(1.0)
        parameter.add_(3e-5)
    assert policy.snapshot()[name].unique().item() == pytest.approx(1.00003, abs=1e-6)
    assert policy.snapshot()[name].unique().item() != 1.0


@pytest.mark.parametrize("guidance", [4.5, 2.0, 0.5])
def test_guidance(guidance: float) -> None:
    policy = tiny_policy(moved=0.3)
    with torch.no_grad():
        prompted, unprompted = (
            policy.velocity(latents(), 700.0, embedding(p)) for p in ("a cat", "bad")
        )
    wanted = unprompted + guidance * (prompted - unprompted)
    assert torch.equal(velocity(policy, guidance), wanted)
    assert (wanted - prompted).abs().max() > 1e-3
    assert forwards_per_velocity(guidance) == 2 and forwards_per_velocity(1.0) == 1


def test_guidance_without_a_negative_prompt_is_an_error() -> None:
    with pytest.raises(FlashGRPOError, match=r"guidance 4\.5 needs a negative"):
        tiny_policy().velocity(latents(), 700.0, embedding("a cat"), None, 4.5)


def test_prompt_and_timestep_matter() -> None:
    policy = tiny_policy(moved=0.3)
    with torch.no_grad():
        one = policy.velocity(latents(), 700.0, embedding("a cat"))
        assert not torch.allclose(one, policy.velocity(latents(), 700.0, embedding("a dog")))
        assert not torch.allclose(one, policy.velocity(latents(), 300.0, embedding("a cat")))
        # ComfyUI's timesteps are not whole numbers: they must not be rounded on the way.
        assert not torch.equal(one, policy.velocity(latents(), 700.4, embedding("a cat")))


def gradient(policy: WanPolicy) -> dict[str, torch.Tensor]:
    out = policy.velocity(latents(), 700.0, embedding("a cat"), embedding("bad"), 4.5)
    out.square().mean().backward()
    return {name: p.grad for name, p in policy.parameters().items()}


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    plain = gradient(tiny_policy(moved=0.3))
    policy = tiny_policy(moved=0.3, checkpointing=True)
    calls = []
    policy.transformer.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    saved = gradient(policy)
    assert len(calls) == 4, "two guided forwards and their recomputation"
    assert all(torch.equal(plain[name], saved[name]) for name in plain)


def test_adapters_carry_our_name() -> None:
    layer = tiny_policy().transformer.get_submodule("blocks.0.attn1.to_q")
    assert list(layer.lora_A) == [ADAPTER]
    assert layer.scaling[ADAPTER] == 8.0 / 4
