"""The part of a graph that one worker computes, and its team.

Here: `Part` (the own vertices), and `Team`, which shares arrays that all read and the owner of each row writes.
Not here: dividing a graph (`partition.py`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from syncline.graphs.adjacency import Adjacency
from syncline.graphs.graph import Graph

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


class Team(Protocol):
    """The workers of a run."""

    def wait(self) -> None:
        """Wait until all workers are here. What each has written before, the others then see."""

    def shared(self, name: str, first: np.ndarray) -> np.ndarray:
        """An array that all workers share, with these first values."""

    def end_round(self, state: dict[str, np.ndarray], own: np.ndarray, counters: dict[str, Any]) -> None:
        """A round has ended: keep a copy of it, report it; may raise to end the run."""


class Part:
    """The vertices that one worker updates, with the edges that it needs for that."""

    def __init__(self, graph: Graph, own: np.ndarray | None = None) -> None:
        """`own` are the numbers of the vertices in order; None: all."""
        self.graph = graph
        self.is_whole = own is None
        self.own = np.arange(graph.size) if own is None else own
        self.is_own = np.zeros(graph.size, bool)
        self.is_own[self.own] = True
        self._matrices: dict[str, csr_matrix] = {}

    def mine(self, vertices: np.ndarray | None) -> np.ndarray:
        """Those of these vertices (None: all) that are the own."""
        if vertices is None:
            return self.own
        return vertices if self.is_whole else vertices[self.is_own[vertices]]

    def rows(self, direction: str) -> Adjacency:
        """The edges by the vertex that gathers them."""
        return self.graph.into if direction == "in" else self.graph.out_of

    def sums(self, direction: str) -> csr_matrix:
        """The matrix whose product with values is the sum over the neighbors of the own vertices."""
        if direction not in self._matrices:
            ones = self.rows(direction).ones
            self._matrices[direction] = ones if self.is_whole else ones[self.own]
        return self._matrices[direction]

    def readers(self, direction: str) -> Adjacency:
        """By changed vertex the own vertices that gather it."""
        return self._read_in if direction == "in" else self._read_out

    @cached_property
    def _read_in(self) -> Adjacency:
        return self.graph.out_of if self.is_whole else self.graph.out_of.only(self.is_own)

    @cached_property
    def _read_out(self) -> Adjacency:
        return self.graph.into if self.is_whole else self.graph.into.only(self.is_own)
