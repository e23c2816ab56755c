"""The edges of a graph in compressed sparse rows (CSR), by target or by source.

Here: sorting edges into rows, and picking the rows of some vertices. Not here: fields and checks (`graph.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Ints = np.ndarray
"""An array of integers."""


@dataclass(frozen=True)
class Adjacency:
    """Row v has the edges of vertex v: `others[offsets[v]:offsets[v + 1]]` are the vertices at their other ends."""

    offsets: Ints
    others: Ints
    edges: Ints
    """The number of each edge, by which fields of edges are stored."""
    columns: int
    """How many vertices there may be at the other ends."""

    @classmethod
    def of(cls, rows: Ints, others: Ints, size: int) -> Adjacency:
        """The edges by row. Within a row they keep their order, so that sums do not depend on how rows are divided."""
        order = np.argsort(rows, kind="stable")
        offsets = np.zeros(size + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=size), out=offsets[1:])
        return cls(offsets, others[order], order, size)

    @cached_property
    def degrees(self) -> Ints:
        """How many edges each row has."""
        return np.diff(self.offsets)

    @cached_property
    def rows(self) -> Ints:
        """The row of each entry."""
        return np.repeat(np.arange(len(self.degrees)), self.degrees)

    @cached_property
    def ones(self) -> csr_matrix:
        """The matrix with a one for each edge; its product with values of vertices is the sum over neighbors."""
        return self.weighted(np.ones(len(self.others)))

    def weighted(self, weights: np.ndarray) -> csr_matrix:
        """The matrix with these weights, in the order of the entries."""
        from scipy.sparse import csr_matrix  # 0.2 seconds, which reading a graph does not need

        return csr_matrix((weights, self.others, self.offsets), shape=(len(self.degrees), self.columns))

    def pick(self, vertices: Ints) -> tuple[Ints, Ints]:
        """The places of all entries in the rows of `vertices`, row by row, and the length of each row."""
        lengths = self.degrees[vertices]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        places = np.repeat(self.offsets[vertices] - (ends - lengths), lengths) + np.arange(total)
        return places, lengths

    def only(self, is_kept: np.ndarray) -> Adjacency:
        """The same rows, without the entries whose other end is not kept."""
        kept = is_kept[self.others]
        offsets = np.concatenate([[0], np.cumsum(kept)])[self.offsets]
        return Adjacency(offsets, self.others[kept], self.edges[kept], self.columns)
