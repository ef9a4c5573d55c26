"""Dense optical flow without weights or OpenCV: patch inverse search.

The method is DIS, "Fast Optical Flow using Dense Inverse Search" (Kroeger, Timofte, Dai, Van
Gool, ECCV 2016), without its variational refinement: on each pyramid level, from coarse to fine,
overlapping patches of the first frame are searched in the second one by inverse-compositional
Gauss-Newton steps, and the patch displacements are blended into a dense field with weights that
fall with the photometric error. Between search and blending, a 3x3 median over neighbouring
patches removes outliers ("Secrets of Optical Flow", Sun, Roth, Black, CVPR 2010).

Patches are compared after removing their mean, so a change of brightness is not motion. Patches
without texture keep the displacement of the coarser level.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

#: Rec. 601 luma weights of R, G, B.
LUMA = (0.299, 0.587, 0.114)

_PATCH = 8
_STRIDE = 4
_ITERATIONS = 8
# Added to the diagonal of the Gauss-Newton matrix: the texture (grey levels squared, summed over a
# patch) below which a patch says nothing and keeps its starting point. It stands for noise of about
# one grey level in each of the 64 pixels.
_DAMPING = 64.0
_COARSEST = 12  # pixels of the short side below which no further level is added


def luma(frames: np.ndarray) -> torch.Tensor:
    """Grey levels 0..255 of uint8 RGB frames `[T, H, W, 3]`, float32 `[T, H, W]`."""
    rgb = torch.from_numpy(np.ascontiguousarray(frames)).float()
    return rgb[..., 0] * LUMA[0] + rgb[..., 1] * LUMA[1] + rgb[..., 2] * LUMA[2]


def shrink(grey: torch.Tensor, short_side: int) -> torch.Tensor:
    """Scale `[T, H, W]` down (never up) to a short side of about `short_side`, by area."""
    height, width = grey.shape[-2:]
    scale = short_side / min(height, width)
    if scale >= 1:
        return grey
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    return F.interpolate(grey[:, None], size=size, mode="area")[:, 0]


def flow_fields(grey: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flow between consecutive frames, one pair at a time to keep memory small.

    Args:
        grey: float32 `[T, H, W]`, 0..255.

    Yields:
        float32 `[2, H, W]`: displacement in pixels to the right and downwards, `T - 1` times.
    """
    pyramids = None
    for frame in grey:
        current = _pyramid(frame)
        if pyramids is not None:
            yield _match(pyramids, current)
        pyramids = current


def optical_flow(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Flow from `first` to `second`, float32 `[H, W]` each, 0..255.

    Returns:
        float32 `[2, H, W]`: `second[y + flow[1], x + flow[0]]` looks like `first[y, x]`.
    """
    return _match(_pyramid(first), _pyramid(second))


def warp(image: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """Sample `image` `[C, H, W]` at each pixel's position plus `flow` `[2, H, W]`, bilinear."""
    height, width = image.shape[-2:]
    x = torch.arange(width, dtype=torch.float32) + flow[0]
    y = torch.arange(height, dtype=torch.float32)[:, None] + flow[1]
    return _sample(image[None], x[None], y[None])[0]


def _pyramid(frame: torch.Tensor) -> list[torch.Tensor]:
    """Images `[1, 1, h, w]`, finest first, each half the size of the one before."""
    levels = [frame[None, None]]
    while min(levels[-1].shape[-2:]) // 2 >= _COARSEST:
        levels.append(F.avg_pool2d(levels[-1], 2, ceil_mode=True))
    return levels


def _match(first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    flow = torch.zeros(1, 2, *first[-1].shape[-2:])
    for level in range(len(first) - 1, -1, -1):
        size = first[level].shape[-2:]
        if flow.shape[-2:] != size:
            flow = 2 * F.interpolate(flow, size=size, mode="bilinear", align_corners=False)
        flow = _search(first[level], second[level], flow)
    return flow[0]


def _search(first: torch.Tensor, second: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """One level: refine `flow` `[1, 2, h, w]` by patch search, return a field of the same shape."""
    height, width = first.shape[-2:]
    # Patches hang over the border by up to one stride, so that every pixel lies in the same number
    # of them; the frame is repeated at its edge.
    rows = -(-height // _STRIDE) + 1
    columns = -(-width // _STRIDE) + 1
    pad = (
        _STRIDE,
        (columns - 1) * _STRIDE + _PATCH - width - _STRIDE,
        _STRIDE,
        (rows - 1) * _STRIDE + _PATCH - height - _STRIDE,
    )
    padded = F.pad(first, pad, mode="replicate")
    grad_x, grad_y = _gradients(padded)
    template = _patches(padded)  # [P, 64]
    template = template - template.mean(1, keepdim=True)
    gx, gy = _patches(grad_x), _patches(grad_y)
    # Gradients of mean-free patches: the mean is part of what is matched away.
    gx = gx - gx.mean(1, keepdim=True)
    gy = gy - gy.mean(1, keepdim=True)
    hxx = (gx * gx).sum(1) + _DAMPING
    hyy = (gy * gy).sum(1) + _DAMPING
    hxy = (gx * gy).sum(1)
    determinant = hxx * hyy - hxy * hxy

    x, y = _positions(rows, columns)  # [P, 64], pixel coordinates in the unpadded frame
    start = _at_patches(flow, pad)  # [P, 2]
    shift = start.clone()
    best = shift.clone()
    best_error = torch.full((len(shift),), torch.inf)
    residual = torch.empty_like(template)
    for iteration in range(_ITERATIONS + 1):
        values = _sample(second, x + shift[:, :1], y + shift[:, 1:])[0, 0]
        difference = values - values.mean(1, keepdim=True) - template
        error = difference.square().sum(1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better[:, None], shift, best)
        residual = torch.where(better[:, None], difference, residual)
        if iteration == _ITERATIONS:
            break
        bx = (gx * difference).sum(1)
        by = (gy * difference).sum(1)
        step = torch.stack((hyy * bx - hxy * by, hxx * by - hxy * bx), 1) / determinant[:, None]
        shift = shift - step
    # A patch that ran away from its start by more than its own size has found something else.
    lost = (best - start).square().sum(1) > _PATCH**2
    best = torch.where(lost[:, None], start, best)

    grid = best.T.reshape(1, 2, rows, columns)
    grid = _median3(grid)
    best = grid.reshape(2, -1).T
    values = _sample(second, x + best[:, :1], y + best[:, 1:])[0, 0]
    residual = values - values.mean(1, keepdim=True) - template
    weight = 1 / residual.abs().clamp(min=1.0)  # [P, 64]
    stacked = torch.stack((weight, weight * best[:, :1], weight * best[:, 1:]))  # [3, P, 64]
    blended = F.fold(
        stacked.permute(0, 2, 1).reshape(1, 3 * _PATCH**2, -1),
        padded.shape[-2:],
        _PATCH,
        stride=_STRIDE,
    )
    dense = blended[:, 1:] / blended[:, :1]
    return dense[..., pad[2] : pad[2] + height, pad[0] : pad[0] + width]


def _patches(image: torch.Tensor) -> torch.Tensor:
    return F.unfold(image, _PATCH, stride=_STRIDE)[0].T.contiguous()


def _gradients(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    padded = F.pad(image, (1, 1, 1, 1), mode="replicate")
    grad_x = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2
    grad_y = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2
    return grad_x, grad_y


def _positions(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    inside = torch.arange(_PATCH, dtype=torch.float32)
    top = torch.arange(rows, dtype=torch.float32) * _STRIDE - _STRIDE
    left = torch.arange(columns, dtype=torch.float32) * _STRIDE - _STRIDE
    shape = (rows, columns, _PATCH, _PATCH)
    y = (top[:, None, None, None] + inside[None, None, :, None]).expand(shape)
    x = (left[None, :, None, None] + inside[None, None, None, :]).expand(shape)
    return x.reshape(rows * columns, -1), y.reshape(rows * columns, -1)


def _at_patches(flow: torch.Tensor, pad: tuple[int, int, int, int]) -> torch.Tensor:
    """Mean of `flow` over each patch, `[P, 2]`."""
    padded = F.pad(flow, pad, mode="replicate")
    return F.avg_pool2d(padded, _PATCH, stride=_STRIDE)[0].reshape(2, -1).T.contiguous()


def _median3(grid: torch.Tensor) -> torch.Tensor:
    """3x3 median of each channel of `[1, C, h, w]`, edges repeated."""
    padded = F.pad(grid, (1, 1, 1, 1), mode="replicate")
    windows = F.unfold(padded.transpose(0, 1), 3)  # [C, 9, h*w]
    return windows.median(dim=1).values.reshape(grid.shape)


def _sample(image: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Bilinear values of `image` `[1, C, H, W]` at pixel positions `x`, `y`, edges repeated.

    `x` and `y` are `[P, Q]` (or `[1, P, Q]`); the result is `[1, C, P, Q]`.
    """
    height, width = image.shape[-2:]
    grid = torch.stack(
        ((2 * x + 1) / width - 1, (2 * y + 1) / height - 1),
        -1,
    ).reshape(1, *x.shape[-2:], 2)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)
