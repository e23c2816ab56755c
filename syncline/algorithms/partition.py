"""Cutting a row of things into parts for workers. Pure functions of counts; nothing is moved here."""

from __future__ import annotations

__all__ = ["share", "split"]


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """`parts` contiguous ranges that cover `range(count)` in order; the first `count % parts` are one longer.

    >>> split(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    return [share(count, parts, index) for index in range(parts)]


def share(count: int, parts: int, index: int) -> tuple[int, int]:
    """The `index`-th range of `split(count, parts)`."""
    if parts < 1:
        raise ValueError(f"Cannot split into {parts} parts.")
    if not 0 <= index < parts:
        raise ValueError(f"There is no part {index} of {parts}.")
    base, extra = divmod(count, parts)
    start = index * base + min(index, extra)
    return start, start + base + (1 if index < extra else 0)
