"""Which rows of which parameters lie in one part of the flat vector.

The flat vector holds all parameters one behind the other, each as its memory has it. A part is cut at rows (one index
of a parameter's first dimension, `syncline.algorithms.partition.cut_rows`), so what lies in it of a parameter is again
a tensor, with fewer rows. Here: that arithmetic. Not here: tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "overlap", "pieces_of"]

Span = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Some rows of one parameter, as they lie in a part."""

    parameter: int
    """Its index among all parameters."""
    first_row: int
    rows: int
    shape: tuple[int, ...]
    """Of the piece: the parameter's, with fewer rows."""
    offset: int
    """Where it begins in the part."""
    is_sparse: bool
    """Its gradient names the rows that it touches; an optimiser leaves the others alone."""

    @property
    def numel(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """How many values one row has."""
        return self.numel // self.rows

    @property
    def span(self) -> Span:
        """Where it lies in the part."""
        return self.offset, self.offset + self.numel


def pieces_of(shapes: Sequence[Sequence[int]], part: Span, sparse: Sequence[bool] | None = None) -> list[Piece]:
    """What lies in `part` of parameters with these shapes, in order; parameters without values are in no part."""
    low, high = part
    pieces: list[Piece] = []
    start = 0
    for index, shape in enumerate(shapes):
        numel = math.prod(shape)
        begin, end = max(start, low), min(start + numel, high)
        if begin < end:
            row = math.prod(shape[1:])
            first, rest = divmod(begin - start, row)
            rows, more = divmod(end - begin, row)
            assert rest == more == 0, f"part {part} cuts parameter {index} within a row"
            pieces.append(
                Piece(
                    parameter=index,
                    first_row=first,
                    rows=rows,
                    shape=(rows, *shape[1:]) if shape else (),
                    offset=begin - low,
                    is_sparse=bool(sparse and sparse[index]),
                )
            )
        start += numel
    return pieces


def overlap(first: Span, second: Span) -> Span | None:
    """What two ranges have in common, or None."""
    low, high = max(first[0], second[0]), min(first[1], second[1])
    return (low, high) if low < high else None
