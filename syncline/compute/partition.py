"""Partitioning ranges among workers. Pure functions of counts; no data is moved here."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence


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


def cut_rows(shapes: Sequence[Sequence[int]], parts: int) -> list[tuple[int, int]]:
    """`parts` contiguous ranges of the flat vector of parameters with these shapes, in order, as equal as rows allow.

    A row is one index of a parameter's first dimension; of a parameter with fewer than two dimensions it is one value.
    Each cut is the boundary of a row that is nearest to where equal parts would be cut, so no part is more than a row
    from its fair share. Where rows are longer than parts would be, some parts are empty.

    >>> cut_rows([(3, 4), (5,)], 2)
    [(0, 8), (8, 17)]
    """
    if parts < 1:
        raise ValueError(f"Cannot cut parameters into {parts} parts.")
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    total = ends[-1] if ends else 0
    cuts = [0, *(_nearest_row(shapes, ends, index * total, parts) for index in range(1, parts)), total]
    return list(itertools.pairwise(cuts))


def _nearest_row(shapes: Sequence[Sequence[int]], ends: Sequence[int], numerator: int, denominator: int) -> int:
    """The boundary of a row that is nearest to the fraction; of two equally near ones, the lower."""
    index = bisect_right(ends, numerator // denominator)
    if index == len(ends):
        return ends[-1] if ends else 0
    row = math.prod(shapes[index][1:])
    start = ends[index] - math.prod(shapes[index])
    low = start + (numerator // denominator - start) // row * row
    return low if 2 * numerator <= (2 * low + row) * denominator else low + row
