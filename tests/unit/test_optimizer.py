"""AdamW on the LoRA: written out, restored bit for bit, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashgrpo_core.config import OptimConfig
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.policy import WanPolicy
from flashgrpo_core.seeds import generator
from flashgrpo_core.update import PolicyOptimizer
from tests.unit._tiny import (  # noqa: F401
    one_thread,
    sample_all,
    tiny_groups,
    tiny_policy,
    tiny_sampler,
)
from tests.unit._train import ELEMENTS, Gradient, norm, update


def drawn(policy: WanPolicy, seed: int, scale: float = 1e-3) -> Gradient:
    return {
        name: scale
        * torch.randn(p.shape, generator=generator(seed, name, "gradient"), dtype=torch.float64)
        for name, p in policy.parameters().items()
    }


def test_one_step_moves_exactly_the_lora() -> None:
    policy = tiny_policy()
    sampler, groups = tiny_sampler(policy, guidance=4.5), tiny_groups(3)
    rollouts = sample_all(sampler, groups)
    before = {n: t.clone() for n, t in policy.transformer.state_dict().items()}
    gradient, stats = update(sampler, groups, rollouts)
    assert stats.ratio_drift == 0.0
    PolicyOptimizer(policy, OptimConfig(), ELEMENTS).step(gradient)
    moved = set()
    for name, tensor in policy.transformer.state_dict().items():
        if not torch.equal(tensor, before[name]):
            moved.add(name)
    assert moved and all(".lora_" in name for name in moved)
    every_b = {name for name in before if ".lora_B." in name}
    assert every_b <= moved and len(every_b) == 16
    # B starts at zero, so A has no gradient yet: in its first step it only decays.
    for name in before.keys() - every_b - (before.keys() - moved):
        torch.testing.assert_close(
            policy.transformer.state_dict()[name],
            before[name] * (1 - OptimConfig().learning_rate / 5 * OptimConfig().weight_decay),
            rtol=1e-6,
            atol=0,
        )
    assert all(torch.isfinite(t).all() for t in policy.snapshot().values())


def test_adamw_written_out() -> None:
    config = OptimConfig(
        learning_rate=3e-3, warmup=4, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1,
        max_grad_norm=0.05, ema_decay=0.7,
    )  # fmt: skip
    policy = tiny_policy(moved=0.1)
    optimizer = PolicyOptimizer(policy, config, ELEMENTS)
    theta = {n: t.double() for n, t in policy.snapshot().items()}
    ema = dict(theta)
    m = {n: torch.zeros_like(t) for n, t in theta.items()}
    v = dict(m)
    for t in range(1, 7):
        gradient = drawn(policy, t, scale=1e-3 if t % 2 else 1e-5)
        length = norm(gradient)
        assert (length > 0.05) == bool(t % 2), "the clip must engage in every other step"
        assert optimizer.step(gradient) == pytest.approx(length, rel=1e-12)
        lr = 3e-3 * min(1, t / 4)
        assert optimizer.learning_rate(t) == pytest.approx(lr)
        for n in theta:
            g = gradient[n] * min(1.0, 0.05 / length)
            m[n] = 0.8 * m[n] + 0.2 * g
            v[n] = 0.95 * v[n] + 0.05 * g * g
            theta[n] = theta[n] * (1 - lr * 0.1) - lr * (m[n] / (1 - 0.8**t)) / (
                (v[n] / (1 - 0.95**t)).sqrt() + 1e-6
            )
            ema[n] = 0.7 * ema[n] + 0.3 * theta[n]
    for n, tensor in policy.snapshot().items():
        torch.testing.assert_close(tensor.double(), theta[n], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.ema[n].double(), ema[n], rtol=1e-5, atol=1e-6)
    assert optimizer.step_count == 6


def test_warmup_and_default_clip_norm() -> None:
    policy = tiny_policy()
    optimizer = PolicyOptimizer(policy, OptimConfig(learning_rate=1e-4, warmup=5), 2_100_000)
    assert optimizer.max_grad_norm == pytest.approx(0.003)
    rates = [optimizer.learning_rate(t) for t in range(1, 8)]
    np.testing.assert_allclose(rates, [2e-5, 4e-5, 6e-5, 8e-5, 1e-4, 1e-4, 1e-4])
    none = PolicyOptimizer(policy, OptimConfig(learning_rate=1e-4, warmup=0), 21_000)
    assert none.learning_rate(1) == 1e-4
    assert none.max_grad_norm == pytest.approx(0.03)  # the norm falls as 1 / sqrt(D)
    assert PolicyOptimizer(policy, OptimConfig(max_grad_norm=2.0), 21_000).max_grad_norm == 2.0


def test_tiny_gradients_are_not_throttled_by_epsilon() -> None:
    """Gradients here are about 1e-8 an element, where the usual epsilon would halve every step."""
    policy = tiny_policy()
    before = policy.snapshot()
    config = OptimConfig(learning_rate=1e-3, warmup=0, weight_decay=0.0)
    PolicyOptimizer(policy, config, ELEMENTS).step(drawn(policy, 1, scale=1e-8))
    steps = torch.cat([(t - before[n]).abs().flatten() for n, t in policy.snapshot().items()])
    assert steps.median() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_restored_optimizer_continues_bit_for_bit(steps: int) -> None:
    config = OptimConfig(learning_rate=1e-3, warmup=3)
    policy = tiny_policy(moved=0.1)
    optimizer = PolicyOptimizer(policy, config, ELEMENTS)
    for t in range(steps):
        optimizer.step(drawn(policy, t))
    adapter, state = policy.snapshot(), optimizer.state()
    ema = {n: t.clone() for n, t in optimizer.ema.items()}
    assert len(state) == (2 * len(adapter) + 1 if steps else 0)  # and the last norms

    other = tiny_policy(seed=1)
    other.load(adapter)
    restored = PolicyOptimizer(other, config, ELEMENTS)
    restored.step(drawn(other, 99))  # whatever it held before must be gone
    other.load(adapter)
    restored.load_state(state, steps)
    restored.ema = ema
    for t in range(steps, steps + 3):
        optimizer.step(drawn(policy, t))
        restored.step(drawn(other, t))
    assert restored.step_count == optimizer.step_count == steps + 3
    for n, tensor in policy.snapshot().items():
        assert torch.equal(tensor, other.snapshot()[n]), n
        assert torch.equal(optimizer.ema[n], restored.ema[n]), n
    for n, tensor in optimizer.state().items():
        assert torch.equal(tensor, restored.state()[n]), n


def test_saved_state_is_a_copy() -> None:
    policy = tiny_policy(moved=0.1)
    optimizer = PolicyOptimizer(policy, OptimConfig(), ELEMENTS)
    optimizer.step(drawn(policy, 1))
    state = optimizer.state()
    kept = {n: t.clone() for n, t in state.items()}
    optimizer.step(drawn(policy, 2))
    assert all(torch.equal(kept[n], t) for n, t in state.items())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float) -> None:
    policy = tiny_policy(moved=0.1)
    optimizer = PolicyOptimizer(policy, OptimConfig(), ELEMENTS)
    optimizer.step(drawn(policy, 1))
    before, state = policy.snapshot(), optimizer.state()
    ema = {n: t.clone() for n, t in optimizer.ema.items()}
    gradient = drawn(policy, 2)
    next(iter(gradient.values()))[0, 0] = poison
    assert not math.isfinite(optimizer.step(gradient))
    assert optimizer.step_count == 1
    assert all(torch.equal(before[n], t) for n, t in policy.snapshot().items())
    assert all(torch.equal(state[n], t) for n, t in optimizer.state().items())
    assert all(torch.equal(ema[n], t) for n, t in optimizer.ema.items())


def test_a_gradient_of_exactly_zero_is_an_error() -> None:
    policy = tiny_policy(moved=0.1)
    optimizer = PolicyOptimizer(policy, OptimConfig(), ELEMENTS)
    before = policy.snapshot()
    with pytest.raises(FlashGRPOError, match="exactly zero"):
        optimizer.step({n: torch.zeros_like(g) for n, g in drawn(policy, 1).items()})
    assert all(torch.equal(before[n], t) for n, t in policy.snapshot().items())


def test_ema_decay_zero_is_the_live_policy() -> None:
    policy = tiny_policy(moved=0.1)
    optimizer = PolicyOptimizer(policy, OptimConfig(ema_decay=0.0), ELEMENTS)
    optimizer.step(drawn(policy, 1))
    assert all(torch.equal(optimizer.ema[n], t) for n, t in policy.snapshot().items())


def test_spikes_are_cut_at_the_scale_of_the_run() -> None:
    """With real gradients: the usual ones pass, one much larger counts as five.

    The absolute default, 0.003 sqrt(2.1e6 / D), lies far above the gradients of a small model.
    """
    policy = tiny_policy(moved=0.1)
    sampler = tiny_sampler(policy)
    config = OptimConfig(learning_rate=1e-6, warmup=0)
    optimizer = PolicyOptimizer(policy, config, ELEMENTS)
    usual = []
    for iteration in range(1, 9):
        groups = tiny_groups(3, iteration=iteration)
        gradient, _ = update(sampler, groups, sample_all(sampler, groups))
        assert set(optimizer._clip_factors(gradient).values()) == {1.0}
        optimizer.norms[""].pop()  # looked at once more by the step itself
        usual.append(optimizer.step(gradient))
        sampler.forget()
    assert max(usual) < 0.2 * optimizer.max_grad_norm, "the absolute norm alone would cut nothing"
    scale = 0.99 * optimizer.max_grad_norm / norm(gradient)  # the absolute norm lets it pass
    spike = {name: scale * g for name, g in gradient.items()}
    limit = optimizer.clip_norm()
    assert limit == pytest.approx(5 * np.median(usual), rel=1e-9)
    factors = optimizer._clip_factors(spike)
    assert norm({n: factors[n] * g for n, g in spike.items()}) == pytest.approx(limit, rel=1e-9)
    # Once is no news, often is: the median follows what has become usual.
    for _ in range(9):
        optimizer._clip_factors(spike)
    assert set(optimizer._clip_factors(spike).values()) == {1.0}
    off = PolicyOptimizer(policy, OptimConfig(spike=0.0), ELEMENTS)
    off.norms[""] = list(usual)
    assert off.clip_norm() == off.max_grad_norm
