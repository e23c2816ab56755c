"""Formatting numbers and shapes for people."""

from __future__ import annotations

from collections.abc import Sequence


def format_shape(shape: Sequence[int]) -> str:
    """`20 x 24 x 24`; a single number has no shape."""
    return " x ".join(map(str, shape)) or "1"


def format_count(number: int) -> str:
    """Three digits and a unit: 1.23 M.

    >>> [format_count(n) for n in (0, 999, 1500, 25_000_000)]
    ['0', '999', '1.5 k', '25 M']
    """
    return _scaled(number, ("", " k", " M", " G", " T"))


def format_bytes(number: int) -> str:
    """Three digits and a unit: 46.1 kB."""
    return _scaled(number, (" B", " kB", " MB", " GB", " TB"))


def _scaled(number: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"
