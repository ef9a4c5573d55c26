"""The multistep solver against the exact flow of Gaussian data, and its shortened grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.schedule import make_schedule
from flashgrpo_core.solver import multistep, suffix_sigmas

SPREAD = 0.3  # standard deviation of the data


def level(sigma: float) -> float:
    """Standard deviation of x at a noise level."""
    return float(np.sqrt((1 - sigma) ** 2 * SPREAD**2 + sigma**2))


def gaussian_velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """v = E[eps - x0 | x] for x0 ~ N(0, SPREAD^2), in closed form."""
    return x * (sigma - (1 - sigma) * SPREAD**2) / level(sigma) ** 2


def start(sigma: float) -> torch.Tensor:
    return torch.linspace(-2, 2, 9, dtype=torch.float64).reshape(1, 1, 1, 3, 3) * level(sigma)


def error(sigmas: np.ndarray, solver=multistep) -> float:
    """Distance from the exact end point; the flow only rescales x."""
    x = start(sigmas[0])
    exact = x / level(sigmas[0]) * level(sigmas[-1])
    return float((solver(gaussian_velocity, x, sigmas) - exact).abs().max())


def euler(velocity, x, sigmas):
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = x + (following - sigma) * velocity(x, sigma)
    return x


def test_it_converges_with_second_order() -> None:
    errors = [error(np.linspace(0.8, 0.2, n + 1)) for n in (20, 40, 80)]
    orders = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert orders == pytest.approx([2.0, 2.0], abs=0.25)


@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_half_the_steps_are_nearer_than_euler_with_all(shift: float) -> None:
    sigmas = make_schedule("simple", 20, shift).sigmas
    half = suffix_sigmas(sigmas, 5, 0.5)
    assert len(half) == 9
    assert error(half) < error(sigmas[5:], euler)


def test_a_single_step_and_a_start_at_pure_noise() -> None:
    x = start(0.5)
    one = multistep(gaussian_velocity, x, np.array([0.5, 0.0]))
    assert torch.equal(one, x - 0.5 * gaussian_velocity(x, 0.5))
    first = multistep(gaussian_velocity, start(1.0), np.array([1.0, 0.9]))
    assert torch.allclose(first, euler(gaussian_velocity, start(1.0), [1.0, 0.9]), atol=1e-12)
    assert error(make_schedule("simple", 50, 3.0).sigmas) < 0.01
    assert torch.equal(multistep(gaussian_velocity, x, np.array([0.5])), x)


def test_the_short_grid_ends_as_the_schedule_does() -> None:
    sigmas = make_schedule("unipc-a", 20, 5.0).sigmas
    for first in range(1, 21):
        for share in (0.05, 0.3, 0.5, 0.99, 1.0):
            short = suffix_sigmas(sigmas, first, share)
            assert len(short) - 1 == int(np.ceil(share * (20 - first) - 1e-9))
            assert short[0] == sigmas[first] and short[-1] == 0.0
            assert (np.diff(short) < 0).all()
            if len(short) > 2:
                assert short[-2] == sigmas[-2]
    assert np.array_equal(suffix_sigmas(sigmas, 7, 1.0), sigmas[7:])
    with pytest.raises(FlashGRPOError, match="suffix share 0.0 is outside 0 to 1"):
        suffix_sigmas(sigmas, 3, 0.0)
