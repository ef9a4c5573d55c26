"""Comparing computed numbers with printed ones: exactly as many digits as are printed count."""

from __future__ import annotations

from collections.abc import Iterable


def assert_digits(values: Iterable[float], printed: str) -> None:
    """Check that each value, rounded to the digits of its printed number, is that number.

    Args:
        values: computed numbers.
        printed: as many numbers, separated by blanks, e.g. `.9997 .982420`.
    """
    values, texts = [float(v) for v in values], printed.split()
    assert len(values) == len(texts), f"{len(values)} values for {len(texts)} printed numbers"
    for i, (value, text) in enumerate(zip(values, texts, strict=True)):
        half = 0.5 * 10.0 ** -len(text.partition(".")[2])
        assert abs(value - float(text)) <= half * (1 + 1e-9), f"number {i}: {value} is not {text}"
