"""Sigma schedules against printed values, ComfyUI's own table and diffusers' own scheduler."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from flashgrpo_core.errors import FlashGRPOError
from flashgrpo_core.schedule import SCHEDULES, make_schedule
from tests.unit._digits import assert_digits

SIGMAS_A_20_3 = (
    ".999666 .982420 .963941 .944094 .922722 .899640 .874635 .847457 .817810 .785340 "
    ".749625 .710152 .666296 .617284 .562148 .499667 .428265 .345888 .249792 .136240 0"
)
TIMESTEPS_A_20_3 = "999 982 963 944 922 899 874 847 817 785 749 710 666 617 562 499 428 345 249 136"


def test_reference_schedule() -> None:
    schedule = make_schedule("unipc-a", 20, 3.0)
    assert_digits(schedule.sigmas, SIGMAS_A_20_3)
    assert schedule.timesteps.tolist() == [float(t) for t in TIMESTEPS_A_20_3.split()]
    assert schedule.sigmas.dtype == schedule.timesteps.dtype == np.float64


@pytest.mark.parametrize(
    ("steps", "shift", "first_half"),
    [
        (20, 5.0, "999 989 978 965 952 937 920 902 882 859"),
        (12, 3.0, "999 970 937 899 856 807"),
        (12, 5.0, "999 981 961 937 908 874"),
        (12, 8.0, "999 988 975 959 941 917"),
        (16, 3.0, "999 977 954 928 899 868 832 793"),
        (10, 3.0, "999 963 922 874 817"),
    ],
)
def test_whole_timesteps_of_grid_a(steps: int, shift: float, first_half: str) -> None:
    timesteps = make_schedule("unipc-a", steps, shift).timesteps
    assert timesteps[: steps // 2].tolist() == [float(t) for t in first_half.split()]


def test_the_three_grids_differ_where_they_should() -> None:
    a, b, c = (make_schedule(kind, 20, 3.0) for kind in ("unipc-a", "unipc-b", "simple"))
    assert_digits([a.sigmas[0], b.sigmas[0]], "0.999666 0.999999")
    assert c.sigmas[0] == 1.0
    assert b.timesteps[:10].tolist() == [999, 982, 964, 944, 923, 900, 875, 848, 818, 786]
    # ComfyUI hands the network 1000 sigma unrounded; the whole numbers are its integer part.
    assert np.floor(c.timesteps[:10] + 1e-9).tolist() == [
        1000, 982, 964, 944, 923, 900, 875, 847, 818, 785,
    ]  # fmt: skip
    np.testing.assert_array_equal(c.timesteps, 1000 * c.sigmas[:-1])


@pytest.mark.parametrize(
    ("shift", "printed"),
    [
        (3.0, "1 .9 .75 .5 0"),
        (5.0, "1 .9375 .8333 .625 0"),
        (8.0, "1 .96 .8889 .7273 0"),
    ],
)
def test_four_steps_of_simple(shift: float, printed: str) -> None:
    assert_digits(make_schedule("simple", 4, shift).sigmas, printed)


@pytest.mark.parametrize("steps", [2, 3, 4, 6, 7, 8, 12, 16, 20, 30, 33, 37, 50, 99, 301, 1000])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0])
def test_simple_is_comfyui_s_scheduler(steps: int, shift: float) -> None:
    """ComfyUI picks entries from a float32 table of 1000 sigmas by truncated index."""
    t = torch.arange(1, 1001, 1) / 1000
    table = shift * t / (1 + (shift - 1) * t)
    stride = len(table) / steps
    expected = [float(table[-(1 + int(x * stride))]) for x in range(steps)] + [0.0]
    np.testing.assert_allclose(
        make_schedule("simple", steps, shift).sigmas, expected, rtol=3e-7, atol=0
    )


@pytest.mark.parametrize("steps", [2, 4, 10, 12, 20, 37, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0])
def test_one_unipc_grid_is_the_installed_scheduler_s(steps: int, shift: float) -> None:
    """diffusers changed its grid between 0.35 and 0.38: whichever is installed must be ours."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(steps)
    theirs = scheduler.sigmas.double().numpy()
    kind = "unipc-b" if theirs[0] > 1 - 1e-5 else "unipc-a"
    ours = make_schedule(kind, steps, shift)
    np.testing.assert_allclose(ours.sigmas, theirs, rtol=2e-7, atol=0)
    assert ours.timesteps.tolist() == [float(t) for t in scheduler.timesteps]


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("steps", [2, 13, 20, 1000])
@pytest.mark.parametrize("shift", [0.3, 1.0, 3.0, 17.0, 100.0])
def test_shape_of_a_schedule(kind: str, steps: int, shift: float) -> None:
    schedule = make_schedule(kind, steps, shift)
    assert schedule.steps == steps == len(schedule.timesteps) == len(schedule.sigmas) - 1
    assert (schedule.kind, schedule.shift) == (kind, shift)
    assert schedule.sigmas[-1] == 0.0 and 0 < schedule.sigmas[0] <= 1.0
    assert (schedule.dt < 0).all()
    np.testing.assert_allclose(schedule.dt.sum(), -schedule.sigmas[0], rtol=1e-12)


def test_a_schedule_is_not_rebound() -> None:
    schedule = make_schedule("simple", 4, 3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.shift = 5.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("karras", 20, 3.0), "karras"),
        (("simple", 0, 3.0), "0"),
        (("simple", -1, 3.0), "-1"),
        (("simple", 1, 3.0), "steps 1 is"),
        (("unipc-a", 1001, 3.0), "1001"),
        (("simple", 20, 0.0), "0.0"),
        (("simple", 20, -3.0), "-3.0"),
        (("simple", 20, 100.5), "100.5"),
        (("unipc-b", 20, math.inf), "inf"),
        (("unipc-b", 20, math.nan), "nan"),
    ],
)
def test_bad_requests_are_named(arguments: tuple[str, int, float], named: str) -> None:
    with pytest.raises(FlashGRPOError, match=named) as caught:
        make_schedule(*arguments)
    assert "\n" not in str(caught.value)
