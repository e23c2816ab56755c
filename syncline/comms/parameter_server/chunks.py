"""Which rows of which parameters a shard holds.

The flat vector holds all parameters one after the other, each in its memory order. A shard is a range of it that starts
and ends at rows (an index of a parameter's first dimension, `syncline.compute.partition.cut_rows`), so the shard's
chunk of a parameter is again a tensor, with fewer rows. Here: that arithmetic. Not here: tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class ParameterChunk:
    """The rows of one parameter that a shard holds."""

    parameter: int
    """Its index among all parameters."""
    first_row: int
    rows: int
    shape: tuple[int, ...]
    """Of the chunk: the parameter's, with fewer rows."""
    offset: int
    """Where the chunk begins in the shard."""
    is_sparse: bool
    """Its gradient is sparse: the optimizer leaves rows that it does not name alone."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        return self.numel // self.rows

    @property
    def span(self) -> Span:
        """Its range of the shard."""
        return self.offset, self.offset + self.numel


def chunks_in(
    shapes: Sequence[Sequence[int]], part: Span, sparse: Sequence[bool] | None = None
) -> list[ParameterChunk]:
    """The chunks that `part` of the flat vector has of parameters with these shapes, in order; no empty ones."""
    low, high = part
    chunks: list[ParameterChunk] = []
    start = 0
    for index, shape in enumerate(shapes):
        numel = math.prod(shape)
        begin, end = max(start, low), min(start + numel, high)
        if begin < end:
            row = math.prod(shape[1:])
            first, rest = divmod(begin - start, row)
            rows, more = divmod(end - begin, row)
            assert rest == more == 0, f"part {part} cuts parameter {index} within a row"
            chunks.append(
                ParameterChunk(
                    parameter=index,
                    first_row=first,
                    rows=rows,
                    shape=(rows, *shape[1:]) if shape else (),
                    offset=begin - low,
                    is_sparse=bool(sparse and sparse[index]),
                )
            )
        start += numel
    return chunks


def overlap(first: Span, second: Span) -> Span | None:
    """The intersection of two ranges, or None."""
    low, high = max(first[0], second[0]), min(first[1], second[1])
    return (low, high) if low < high else None
