"""Sums of floating-point numbers that do not depend on how the numbers are divided over workers, or on their order.

A float64 is an integer times a power of two, so a sum of them is an integer times the smallest such power: exact sums
of parts add up to the exact sum of all, which is rounded once.
"""

from __future__ import annotations

import numpy as np

_SHIFT = 1127
"""All float64 are multiples of 2 to the power of -1127: the smallest exponent, and the 53 bits of a mantissa."""
_HALF_BITS = 26
INFINITE = -1
"""Stands for a sum with an infinite term; exact sums here are of numbers from 0."""


def exact_sum(values: np.ndarray) -> int:
    """The sum of numbers from 0, as a multiple of 2**-1127; `INFINITE` if one of them is.

    >>> rounded(exact_sum(np.array([0.1, 0.2])) + exact_sum(np.array([0.3])))
    0.6
    """
    values = np.asarray(values, np.float64).ravel()
    if not len(values):
        return 0
    if np.isinf(values).any():
        return INFINITE
    mantissas, exponents = np.frexp(values)
    integers = (mantissas * 2.0**53).astype(np.int64)
    least = int(exponents.min())
    places = exponents - least
    # Halves of 27 bits: up to 2**26 of them add up exactly in a float64.
    high = np.bincount(places, weights=integers >> _HALF_BITS)
    low = np.bincount(places, weights=integers & ((1 << _HALF_BITS) - 1))
    total = sum(((int(h) << _HALF_BITS) + int(b)) << place for place, (h, b) in enumerate(zip(high, low, strict=True)))
    return total << (least - 53 + _SHIFT)


def rounded(total: int) -> float:
    """The float64 nearest to a sum of exact sums."""
    return float("inf") if total < 0 else total / (1 << _SHIFT)


def packed(total: int) -> bytes:
    return total.to_bytes((total.bit_length() + 8) // 8, "little", signed=True)


def unpacked(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def together(parts: list[int]) -> int:
    """The sum of the parts of all workers."""
    return INFINITE if INFINITE in parts else sum(parts)
