"""Iso-temporal groups: the draw of SDE steps, seeds that depend on nothing but their purpose."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgrpo_core.config_io import build_config, sde_window
from flashgrpo_core.distributed import World
from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.groups import choose_prompts, draw_steps, make_groups, prompt_key
from flashgrpo_core.rollout import sample_shares
from flashgrpo_core.seeds import derive_seed, generator, normal


def groups_for(prompts: list[str], **options: object) -> list:
    given_ = {"iteration": 3, "run_seed": 7, "group_size": 4, "window": (0, 5)} | options
    return make_groups(prompts, **given_)


# The draw.


@pytest.mark.parametrize("iteration", range(1, 30))
def test_24_prompts_cover_a_pool_of_10_two_or_three_times(iteration: int) -> None:
    counts = Counter(draw_steps(24, (0, 10), "stratified", iteration, 11))
    assert sorted(counts) == list(range(10))
    assert set(counts.values()) == {2, 3}


@given(
    count=st.integers(2, 60),
    first=st.integers(0, 20),
    pool=st.integers(2, 30),
    iteration=st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=150, deadline=None)
def test_stratified_steps_are_even(
    count: int, first: int, pool: int, iteration: int, seed: int
) -> None:
    steps = draw_steps(count, (first, first + pool), "stratified", iteration, seed)
    counts = Counter(steps)
    assert len(steps) == count
    assert all(first <= k < first + pool for k in steps)
    every = [counts[k] for k in range(first, first + pool)]
    assert max(every) - min(every) <= 1
    assert len(counts) == min(count, pool) >= 2


@given(
    count=st.integers(2, 6),
    pool=st.integers(2, 4),
    iteration=st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=300, deadline=None)
def test_uniform_steps_are_never_all_equal(
    count: int, pool: int, iteration: int, seed: int
) -> None:
    """With 2 prompts and 2 steps half of all plain draws would be."""
    steps = draw_steps(count, (3, 3 + pool), "uniform", iteration, seed)
    assert len(steps) == count and len(set(steps)) >= 2
    assert all(3 <= k < 3 + pool for k in steps)


def test_uniform_draws_with_replacement_and_evenly() -> None:
    counts: Counter[int] = Counter()
    repeats = 0
    for iteration in range(400):
        steps = draw_steps(10, (0, 10), "uniform", iteration, 1)
        counts.update(steps)
        repeats += len(set(steps)) < 10
    assert repeats > 390  # a permutation is a rare accident
    assert all(340 < counts[k] < 460 for k in range(10)), counts  # 400 +- 3 sigma


def test_the_draw_repeats_for_a_resumed_run_and_changes_with_iteration_and_seed() -> None:
    one = [tuple(draw_steps(8, (0, 10), "stratified", i, 5)) for i in range(20)]
    assert one == [tuple(draw_steps(8, (0, 10), "stratified", i, 5)) for i in range(20)]
    assert len(set(one)) == 20
    other = [tuple(draw_steps(8, (0, 10), "stratified", i, 6)) for i in range(20)]
    assert not set(one) & set(other)


@pytest.mark.parametrize("draw", ["stratified", "uniform"])
@pytest.mark.parametrize(("count", "window"), [(1, (0, 5)), (0, (0, 5)), (4, (2, 3)), (4, (3, 3))])
def test_a_single_noise_level_is_refused(draw: str, count: int, window: tuple[int, int]) -> None:
    with pytest.raises(FlashGRPOError, match="single noise level"):
        draw_steps(count, window, draw, 1, 0)


def test_an_unknown_draw_is_named() -> None:
    with pytest.raises(FlashGRPOError, match="'sobol'.*stratified or uniform"):
        draw_steps(4, (0, 5), "sobol", 1, 0)


@pytest.mark.parametrize("steps", [4, 10, 11, 20])
def test_the_last_step_is_never_eligible(steps: int) -> None:
    def config(window: list[int]):  # noqa: ANN202
        return build_config(
            {"model": {"transformer": "x"}, "schedule": {"steps": steps, "window": window}}
        )

    assert sde_window(config([0, steps - 1])) == (0, steps - 1)  # its last step is steps - 2
    with pytest.raises(FlashGRPOError, match="never stochastic"):
        config([0, steps])
    first, end = sde_window(config([]))
    assert (first, end) == (0, steps // 2)


# Prompts of an iteration.


@given(
    count=st.integers(1, 12),
    total=st.integers(1, 30),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(count: int, total: int, seed: int) -> None:
    iterations = -(-3 * total // count)
    read = [i for it in range(1, iterations + 1) for i in choose_prompts(count, total, it, seed)]
    for epoch in range(3):
        assert sorted(read[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_epochs_are_shuffled_differently() -> None:
    epochs = [tuple(choose_prompts(20, 20, it, 3)) for it in range(1, 6)]
    assert len(set(epochs)) == 5
    assert tuple(range(20)) not in epochs
    assert epochs != [tuple(choose_prompts(20, 20, it, 4)) for it in range(1, 6)]


def test_an_iteration_does_not_need_the_ones_before() -> None:
    """Resume asks for iteration 17 first."""
    direct = choose_prompts(7, 10, 17, 3)
    for iteration in range(1, 17):
        choose_prompts(7, 10, iteration, 3)
    assert choose_prompts(7, 10, 17, 3) == direct


# Identity of a group.


def test_group_id_is_the_sha256_of_the_prompt_and_its_occurrence() -> None:
    a, b, c = groups_for(["fish", "bird", "fish"])
    fish = hashlib.sha256(b"fish").hexdigest()
    assert [a.group_id, c.group_id] == [f"{fish}-0", f"{fish}-1"]
    assert b.group_id == hashlib.sha256(b"bird").hexdigest() + "-0"
    assert not set(a.sde_seeds) & set(c.sde_seeds)
    assert not set(a.noise_seeds) & set(c.noise_seeds)


def test_a_start_image_makes_another_group() -> None:
    a, b, c = groups_for(["fish"] * 3, start_images=[None, "a.png", "b.png"])
    assert len({g.group_id for g in (a, b, c)}) == 3
    assert all(g.group_id.endswith("-0") for g in (a, b, c))
    assert [g.start_image for g in (a, b, c)] == [None, "a.png", "b.png"]
    assert prompt_key("fish", "a.png") == b.group_id.removesuffix("-0")


def test_prompt_and_image_count_must_agree() -> None:
    with pytest.raises(ValueError, match="zip"):
        groups_for(["fish", "bird"], start_images=["a.png"])


def test_noise_of_a_group() -> None:
    shared, independent = (
        groups_for(["fish", "bird"], noise=noise)[0] for noise in ("shared", "independent")
    )
    assert shared.size == independent.size == 4
    assert shared.shared_noise and len(set(shared.noise_seeds)) == 1
    assert not independent.shared_noise and len(set(independent.noise_seeds)) == 4
    # The SDE noise always differs, from the initial noise too.
    for group in (shared, independent):
        assert len(set(group.sde_seeds)) == 4
        assert not set(group.sde_seeds) & set(group.noise_seeds)
    # Sample 0 of both starts from the same noise: the modes can be compared.
    assert shared.noise_seeds[0] == independent.noise_seeds[0]


def test_seeds_depend_on_run_iteration_prompt_and_sample_only() -> None:
    base = groups_for(["fish", "bird"])
    fish = base[0]
    assert groups_for(["bird", "fish"])[1].sde_seeds == fish.sde_seeds  # not on the place
    assert groups_for(["fish", "bird", "cow"], window=(2, 9))[0].sde_seeds == fish.sde_seeds
    assert groups_for(["fish", "bird"], group_size=9)[0].sde_seeds[:4] == fish.sde_seeds
    for change in ({"iteration": 4}, {"run_seed": 8}):
        other = groups_for(["fish", "bird"], **change)[0]
        assert not set(other.sde_seeds + other.noise_seeds) & set(fish.sde_seeds + fish.noise_seeds)


def test_no_cut_of_the_work_changes_a_seed_and_every_cut_covers_all() -> None:
    groups = groups_for(["fish", "bird", "cow"], group_size=5)
    wanted = sorted(
        (g.group_id, i, g.noise_seeds[i], g.sde_seeds[i]) for g in groups for i in range(5)
    )
    for size in (1, 2, 3, 5, 16):
        for micro_batch in (1, 2, 4, 5, 99):
            got = []
            for rank in range(size):
                for g, samples in World(rank, size).deal(sample_shares(groups, micro_batch)):
                    assert 1 <= len(samples) <= micro_batch
                    group = groups[g]
                    got += [
                        (group.group_id, i, group.noise_seeds[i], group.sde_seeds[i])
                        for i in samples
                    ]
            assert sorted(got) == wanted, (size, micro_batch)


def test_groups_are_pinned() -> None:
    """The same numbers in every process and version: nothing salted (Python's `hash`) or global.

    A changed rule would silently make every resumed run another one.
    """
    fish, bird = groups_for(["fish", "bird"], group_size=2)
    assert (fish.sde_step, bird.sde_step) == (0, 1)
    assert fish.noise_seeds == (1594447046019210075, 1594447046019210075)
    assert fish.sde_seeds == (5487091889087578871, 7225685620322731425)
    assert bird.sde_seeds == (5787156317393057206, 1266162218267358707)


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_a_group_of_one_is_refused(size: int) -> None:
    with pytest.raises(FlashGRPOError, match=f"group size {size} is below 2"):
        groups_for(["fish", "bird"], group_size=size)


def test_unknown_noise_is_named() -> None:
    with pytest.raises(FlashGRPOError, match="'pink'.*shared or independent"):
        groups_for(["fish", "bird"], noise="pink")


# Seeds.


def test_a_seed_is_a_sha256_of_its_length_prefixed_parts() -> None:
    text = "1:74:fish3:sde"
    expected = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    assert derive_seed(7, "fish", "sde") == expected
    assert 0 <= expected < 2**63


def test_parts_are_not_glued_together() -> None:
    assert derive_seed("ab", "c") != derive_seed("a", "bc")
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed("1:a") != derive_seed("1", "a")


def test_drawing_leaves_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    groups_for(["fish", "bird"])
    normal((3, 4), 5)
    torch.rand(2, generator=generator(1, "x"))
    assert torch.equal(before, torch.get_rng_state())
    first = normal((3, 4), 5)
    torch.manual_seed(99)
    assert torch.equal(first, normal((3, 4), 5)) and first.dtype == torch.float32
