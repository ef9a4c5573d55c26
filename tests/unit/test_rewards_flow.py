"""Optical flow: against known displacements and against OpenCV's implementation of DIS."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from flashgrpo_core.rewards.flow import flow_fields, luma, optical_flow, shrink, warp
from tests.unit._clips import disc, natural


def _texture(height: int, width: int, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).uniform(0, 255, (height, width)).astype(np.float32)
    picture = cv2.GaussianBlur(noise, (0, 0), 3)
    return cv2.normalize(picture, None, 0, 255, cv2.NORM_MINMAX)


def _shifted(picture: np.ndarray, dx: float, dy: float) -> np.ndarray:
    """`picture` moved by (dx, dy); content beyond the edge is repeated."""
    matrix = np.float32([[1, 0, dx], [0, 1, dy]])
    size = picture.shape[::-1]
    return cv2.warpAffine(picture, matrix, size, flags=cv2.INTER_CUBIC, borderMode=1)


@pytest.mark.parametrize(
    ("height", "width"), [(64, 64), (96, 128), (61, 83), (120, 47)], ids=lambda v: str(v)
)
@pytest.mark.parametrize(("dx", "dy"), [(0, 0), (1, 0), (-2.5, 1.25), (0.3, -0.4), (6, 5)])
def test_known_translation_is_found(height: int, width: int, dx: float, dy: float) -> None:
    first = _texture(height, width)
    flow = optical_flow(torch.from_numpy(first), torch.from_numpy(_shifted(first, dx, dy)))
    assert flow.shape == (2, height, width)
    inner = flow[:, 10:-10, 10:-10]
    error = torch.hypot(inner[0] - dx, inner[1] - dy)
    assert float(error.median()) < 0.1
    assert float(error.mean()) < 0.25


def test_rotation_and_zoom_are_found() -> None:
    first = _texture(96, 96, seed=1)
    centre = (47.5, 47.5)
    matrix = cv2.getRotationMatrix2D(centre, 3.0, 1.04)
    second = cv2.warpAffine(first, matrix, (96, 96), flags=cv2.INTER_CUBIC, borderMode=1)
    flow = optical_flow(torch.from_numpy(first), torch.from_numpy(second)).numpy()
    y, x = np.mgrid[:96, :96].astype(np.float64)
    true_x = matrix[0, 0] * x + matrix[0, 1] * y + matrix[0, 2] - x
    true_y = matrix[1, 0] * x + matrix[1, 1] * y + matrix[1, 2] - y
    error = np.hypot(flow[0] - true_x, flow[1] - true_y)[10:-10, 10:-10]
    assert error.mean() < 0.3


def test_a_moving_object_moves_and_its_ground_does_not() -> None:
    grey = luma(disc([(24, 32), (28, 30)]))
    flow = optical_flow(grey[0], grey[1])
    inside = flow[:, 32 - 5 : 32 + 6, 24 - 5 : 24 + 6].mean((1, 2))
    assert inside.tolist() == pytest.approx([4, -2], abs=0.4)
    # The flat ground has no texture of its own and keeps a part of what the coarse levels see.
    assert float(torch.hypot(flow[0], flow[1])[:, 52:].mean()) < 0.3 * np.hypot(4, 2)


def test_change_of_brightness_is_not_motion() -> None:
    first = torch.from_numpy(_texture(64, 64)) * 0.7
    flow = optical_flow(first, first + 40)
    assert float(flow.abs().max()) < 0.02


def test_flat_frames_have_no_flow() -> None:
    flat = torch.full((64, 64), 128.0)
    assert float(optical_flow(flat, flat + 3).abs().max()) == 0


def test_agrees_with_opencv_on_a_natural_video() -> None:
    """Tolerances are about twice what was measured: 0.36 pixels, 14 percent, 1.0."""
    grey = shrink(luma(natural()[::4]), 128)
    bytes_ = grey.round().to(torch.uint8).numpy()
    dis = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    distance, ours_top, theirs_top, ours_left, theirs_left = [], [], [], [], []
    for t, flow in enumerate(flow_fields(grey)):
        reference = dis.calc(bytes_[t], bytes_[t + 1], None).transpose(2, 0, 1)
        distance.append(np.hypot(*(flow.numpy() - reference)).mean())
        for field, top, left in (
            (flow, ours_top, ours_left),
            (torch.from_numpy(np.ascontiguousarray(reference)), theirs_top, theirs_left),
        ):
            magnitude = torch.hypot(field[0], field[1]).flatten()
            top.append(float(magnitude.topk(len(magnitude) // 20).values.mean()))
            left.append(float((warp(grey[t + 1][None], field)[0] - grey[t]).abs().mean()))
    assert len(distance) == 4
    assert np.mean(distance) < 0.7
    assert np.mean(ours_top) == pytest.approx(np.mean(theirs_top), rel=0.3)
    # What counts in the end: the frames are explained at least as well.
    assert np.mean(ours_left) < 1.15 * np.mean(theirs_left)


def test_scaling_down_keeps_the_shape_and_never_scales_up() -> None:
    grey = torch.zeros(2, 480, 832)
    assert shrink(grey, 128).shape == (2, 128, 222)
    assert shrink(grey, 512) is grey


def test_warp_with_zero_flow_is_the_identity() -> None:
    image = torch.from_numpy(_texture(33, 47))[None]
    assert torch.allclose(warp(image, torch.zeros(2, 33, 47)), image, atol=1e-2)
