"""Rectification on the embedded tiny Wan: gradients of all noise levels become one size."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gradient_scales import measure  # noqa: E402


def test_rectification_flattens_the_gradient_over_the_noise_levels() -> None:
    """A small version of the benchmark, last step excluded; its own figures are 5.6 to 1.25."""
    found = measure(steps=10, guidance=1.0, prompts=2, videos=6)
    raw, rectified = np.array(found["raw"]), np.array(found["rectified"])
    assert len(raw) == len(rectified) == 10 and (raw > 0).all()
    assert found["spread_raw"] == pytest.approx(raw[:-1].max() / raw[:-1].min(), rel=1e-3)
    assert found["falls_by"] >= 4.0
    assert found["spread_rectified"] < 1.6
    # What one gains over the other is lambda, step by step.
    ratio = raw / rectified
    assert ratio.max() / ratio.min() > found["spread_lambda"] > 5.8
    assert (np.diff(ratio) > 0).all()
