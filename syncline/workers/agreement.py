"""Marks: small numbers by which workers notice, in every exchange, that they do not do the same.

Here: pure functions. A mark is made from what must be equal on all workers (the step, which optimizer steps, which
parameters have gradients, a part of the parameters), and its weighted sum and that of its square are piggybacked on the
gradients: all marks are equal if and only if their variance is zero. What differs is asked only then
(`own_loop/checks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

_MARKS = 32
"""Small, so that the sums of squares are exact enough in float32 to see one worker in a thousand."""
_LARGEST_VARIANCE = 4e-4
_SPREAD = 0x9E3779B1
"""2**32 divided by the golden ratio, whose multiples are spread evenly: Knuth, The Art of Computer Programming, 6.4."""


def mark_of(parts: Iterable[int]) -> int:
    """A number from 0 to 31. Parts that differ by one, such as steps, never have the same."""
    return sum(parts) % _MARKS


def is_unanimous(weight: float, total: float, squares: float) -> bool:
    """Whether marks are equal whose weights sum to `weight`, and whose weighted sums are these.

    Numbers that are not finite say nothing: then a gradient was not finite either, or a worker is about to fail.
    """
    if not weight > 0:
        return True
    variance = squares / weight - (total / weight) ** 2
    return not variance > _LARGEST_VARIANCE


def digest(kinds: Iterable[int]) -> int:
    """A number for a sequence of kinds, 0 to 2 each; sequences that differ in one place never have the same mark.

    Each place has an odd weight: 1 or 2 times an odd number is never a multiple of 32. The weights of neighbors are
    unrelated, because parameters are used or unused by layers.
    """
    return sum(kind * ((place * _SPREAD >> 16) | 1) for place, kind in enumerate(kinds))
