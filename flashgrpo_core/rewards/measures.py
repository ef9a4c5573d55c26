"""Measures of faults in pictures and over time, shared by several rewards; no weights.

Grey levels run from 0 to 255. Every function takes float32 grey frames `[T, H, W]`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

#: Blocks along the short side of the grid on which changes over time are measured: coarse enough
#: that noise averages out, fine enough that a blinking eye is seen.
GRID = 24

_PERIOD = 16  # pixels: the longest grid that is looked for

# Squared grey levels of structure per pixel below which a frame counts as empty.
_EMPTY = 1e-3
# Mean swing (see `flicker`) of white noise of standard deviation 1: E sqrt(max(0, -d1 d2)).
_NOISE_SWING = 0.758


def blur(grey: torch.Tensor) -> torch.Tensor:
    """Strength of blur per frame, 0 (sharp) .. 1 (nothing left to blur), float64 `[T]`.

    How much of the variation between neighbouring pixels survives another blur: in a sharp picture
    little (a third at a lone edge), in a blurred one nearly all. The idea is that of "The blur
    effect: perception and estimation with a new no-reference perceptual blur metric" (Crete,
    Dolmiere, Ladret, Nicolas, SPIE 2007), with its filter of 9 pixels. Variation is measured by
    energy here, because the energy of noise is known and can be taken off: otherwise a little noise
    makes a blurred picture look sharp. The worse of the two directions counts; a frame without
    structure is 1.
    """
    variance = noise(grey).square()
    return torch.maximum(_blur_along(grey, 2, variance), _blur_along(grey, 1, variance))


def _blur_along(grey: torch.Tensor, dim: int, noise_variance: torch.Tensor) -> torch.Tensor:
    taps = 9
    size = grey.shape[dim]
    if size < 2:
        return torch.ones(len(grey), dtype=torch.float64)
    before = _energy(grey.diff(dim=dim))
    # The change from one pixel of a moving average to the next is that of its two ends.
    index = torch.arange(size - 1)
    right = (index + 1 + taps // 2).clamp(max=size - 1)
    left = (index - taps // 2).clamp(min=0)
    after = _energy(grey.index_select(dim, right) - grey.index_select(dim, left)) / taps**2
    # A difference of two noisy pixels has twice their variance. 10 percent more for the error of
    # the estimate: better a noisy frame taken for blurred than its noise taken for sharpness.
    before = before - 1.1 * 2 * noise_variance
    after = (after - 2 * noise_variance / taps**2).clamp(min=0)
    empty = before < _EMPTY
    return torch.where(empty, 1.0, (after / before.clamp(min=_EMPTY)).sqrt().clamp(max=1.0))


def _energy(difference: torch.Tensor) -> torch.Tensor:
    return difference.square().mean((1, 2)).double()


def noise(grey: torch.Tensor) -> torch.Tensor:
    """Standard deviation of white noise per frame in grey levels, float64 `[T]`.

    "Fast noise variance estimation" (Immerkaer, CVIU 1996): the mean absolute response of a mask
    that is blind to planes and straight edges, here the second difference along both axes. It is
    taken block by block and the lower quartile of the blocks counts, so that texture in a part of
    the picture is not taken for noise.
    """
    if min(grey.shape[-2:]) < 3:
        return torch.zeros(len(grey), dtype=torch.float64)
    across = grey[:, :, :-2] - 2 * grey[:, :, 1:-1] + grey[:, :, 2:]
    response = (across[:, :-2] - 2 * across[:, 1:-1] + across[:, 2:]).abs()
    side = max(1, min(16, min(response.shape[-2:]) // 4))
    blocks = F.avg_pool2d(response, side).flatten(1).double()
    return math.sqrt(math.pi / 2) / 6 * torch.quantile(blocks, 0.25, dim=1)


def clipping(grey: torch.Tensor) -> torch.Tensor:
    """Share of pixels per frame that are nearly black or nearly white, float64 `[T]`."""
    lost = (grey <= 2) | (grey >= 253)
    return lost.double().mean((1, 2))


def ridges(grey: torch.Tensor) -> torch.Tensor:
    """Where steps between pixels stand out, by their place in a grid of 16, float64 `[T, 2, 16]`.

    For each axis (down, across), the share of pixels at grid positions 0..15 whose step to the next
    pixel is more than a grey level higher than both steps beside it. Counting steps, not adding
    their heights, keeps a few strong edges from deciding.
    """
    found = torch.zeros(len(grey), 2, _PERIOD, dtype=torch.float64)
    for axis, lines in enumerate((grey, grey.transpose(1, 2))):
        step = lines.diff(dim=1).abs()
        if step.shape[1] < 2 * _PERIOD + 2:
            continue
        alone = step[:, 1:-1] - torch.maximum(step[:, :-2], step[:, 2:]) > 1
        share = alone.double().mean(2)  # [T, n]
        place = (torch.arange(share.shape[1]) + 1) % _PERIOD
        for p in range(_PERIOD):
            found[:, axis, p] = share[:, place == p].mean(1)
    return found


def blocks(shares: torch.Tensor) -> float:
    """Strength 0..1 of a fixed grid of 8 or 16 pixels: compression, upsampling and patch artefacts.

    By how much the share of standing-out steps at the grid's own place exceeds that at the others,
    in the direction in which it is weaker. In a picture without a grid all places are alike.

    Args:
        shares: output of `ridges`, averaged over the frames, `[2, 16]`.
    """
    excess = []
    for places in (shares.reshape(2, 2, _PERIOD // 2).mean(1), shares):
        highest = places.amax(1)
        rest = (places.sum(1) - highest) / (places.shape[1] - 1)
        excess.append(float((highest - rest).min()))
    return max(excess)


def block_means(grey: torch.Tensor, blocks: int = GRID) -> torch.Tensor:
    """Means of the frames over a grid of about `blocks` squares along the short side, `[T, h, w]`."""
    height, width = grey.shape[-2:]
    scale = min(1.0, blocks / min(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    return F.adaptive_avg_pool2d(grey[:, None], size)[:, 0]


def flicker(grid: torch.Tensor, noise_sigma: float = 0.0) -> float:
    """Mean swing of brightness that turns round from one frame to the next, in grey levels.

    With the changes `d1`, `d2` between three consecutive frames, the swing of a block is
    `sqrt(max(0, -d1 * d2))`: fades and steady movement give 0, up-and-down gives its height. Fewer
    than three frames cannot flicker.

    Args:
        grid: output of `block_means`, `[T, h, w]`.
        noise_sigma: standard deviation of noise in the grid; its share is taken off.
    """
    change = grid.diff(dim=0)
    if len(change) < 2:
        return 0.0
    swing = (-change[1:] * change[:-1]).clamp(min=0).sqrt()
    return max(0.0, float(swing.double().mean()) - _NOISE_SWING * noise_sigma)


def freeze(grid: torch.Tensor, noise_sigma: float = 0.0) -> float:
    """Share 0..1 of frame pairs in which nothing moves; 0 for a single frame.

    A pair counts by `exp(-m)`. `m` is the largest change of a block in grey levels: a repeated frame
    counts 1, one grey level 0.37, a moving object nothing. The best overall gain and offset are
    taken off first and noise is allowed for, so that a still picture that fades, flickers or
    is grainy remains a still picture.

    Args:
        grid: output of `block_means`, `[T, h, w]`.
        noise_sigma: standard deviation of noise in the grid.
    """
    if len(grid) < 2:
        return 0.0
    frames = grid.flatten(1).double()
    frames = frames - frames.mean(1, keepdim=True)
    first, second = frames[:-1], frames[1:]
    gain = (first * second).sum(1) / first.square().sum(1).clamp(min=1e-9)
    largest = (second - gain[:, None] * first).abs().amax(1)
    # The largest of hundreds of differences of two noisy numbers lies near 4 * sqrt(2) sigma.
    return float(torch.exp(-(largest - 4 * math.sqrt(2) * noise_sigma).clamp(min=0)).mean())
