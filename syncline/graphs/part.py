"""The part of a graph that one worker computes, and its team.

Here: `Part` (the own vertices), and `Team`, with which a part of a run agrees and exchanges what it must. `Alone` is
the team of one process, which shows that the protocol suffices. Not here: dividing a graph (`partition.py`), and a team
of several workers (`workers/part_team.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from syncline.graphs.adjacency import Adjacency
from syncline.graphs.graph import Graph

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


State = dict[str, np.ndarray]
"""The arrays of a run by name, with a row for each vertex or edge of the whole graph, whether known here or not."""


class Team(Protocol):
    """The workers of a run. All of them call all methods in the same order."""

    def total(self, values: np.ndarray) -> float:
        """The sum of these numbers from 0 over all workers."""

    def counts(self, numbers: np.ndarray) -> np.ndarray:
        """The sums of these integers over all workers, place by place."""

    def aggregate(self, function: Callable[[np.ndarray], Any], values: np.ndarray, own: np.ndarray) -> Any:
        """The function of the values of all vertices."""

    def share(self, state: State, names: Sequence[str], changed: np.ndarray) -> np.ndarray:
        """Send the rows of own vertices that have changed to the workers that read them, and receive theirs.

        Returns all vertices known here that have changed, in ascending order.
        """

    def share_edges(self, edges: Mapping[str, np.ndarray], names: Sequence[str], changed: np.ndarray) -> None:
        """The same with fields of edges that were scattered."""

    def end_round(self, state: State, counters: dict[str, Any]) -> bool:
        """A round has ended: keep a copy of it, report it. Whether the run continues."""


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


Progress = Callable[[dict[str, Any]], None]
"""Called after each round with `rounds`, `updates`, `edge_updates` and `pending`: how much may still change."""


class Alone:
    """The team of a run in one process."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    def total(self, values: np.ndarray) -> float:
        return float(values.sum())

    def counts(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def aggregate(self, function: Callable[[np.ndarray], Any], values: np.ndarray, own: np.ndarray) -> Any:
        del own
        return function(values)

    def share(self, state: State, names: Sequence[str], changed: np.ndarray) -> np.ndarray:
        del state, names
        return changed

    def share_edges(self, edges: Mapping[str, np.ndarray], names: Sequence[str], changed: np.ndarray) -> None:
        del edges, names, changed

    def end_round(self, state: State, counters: dict[str, Any]) -> bool:
        if self._progress is not None:
            self._progress({**counters, "pending": left_to_change(state)})
        return True


def left_to_change(state: State, own: Any = slice(None)) -> float:
    """How much may still change: what is pending, or before it is known what the last round has changed."""
    pending = state["pending"][own]
    return float((pending if np.isfinite(pending).all() else state["change"][own]).sum())
