"""What one part of a divided graph needs of the others.

Here: `GraphPart`, pure, made by every worker for every part from the same `Division`. A part *owns* vertices. It
computes with these and with copies of others, its *halo*: vertices at the other ends of its edges. `trades` says which
rows go where. Not here: dividing (`partition.py`) and sending (`comms/halo_exchange.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncline.graphs.graph import Graph
from syncline.graphs.partition import Division


@dataclass(frozen=True)
class GraphPart:
    """The part `rank`. Its local vertices are numbered: its own first, then its halo, both in ascending order."""

    rank: int
    own: np.ndarray
    """The vertices that it owns."""
    halo: np.ndarray
    """The other vertices at the ends of its edges."""
    sources: np.ndarray
    targets: np.ndarray
    """Its edges, by local numbers, sorted by target; those of one target keep the order of their sources."""

    @property
    def vertices(self) -> np.ndarray:
        """The local vertices."""
        return np.concatenate([self.own, self.halo])


@dataclass(frozen=True)
class Trades:
    """Who reads which rows of whom. Row numbers of owners are among their own vertices, those of readers in the halo.

    A rank *posts* each of its own rows that any other reads once; `boundary` are these rows.
    """

    boundary: list[np.ndarray]
    """For each rank, the own rows that it posts, in ascending order."""
    halo_sizes: list[int]
    reads: list[list[tuple[int, np.ndarray, np.ndarray]]]
    """For each rank, from whom it reads: the other rank, the places in what that one posts, and the rows of its own
    halo that they fill."""

    def rows_sent(self, rank: int) -> int:
        """How many rows the others read of `rank`, each reader counted."""
        return sum(len(rows) for reads in self.reads for other, _, rows in reads if other == rank)

    def givers(self, rank: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """For sums of the halos' rows: the other ranks, the rows of their halo that `rank` owns, and its own rows."""
        found = []
        for other, reads in enumerate(self.reads):
            for owner, places, rows in reads:
                if owner == rank:
                    found.append((other, rows, self.boundary[rank][places]))
        return found


def part_of(graph: Graph, division: Division, rank: int) -> GraphPart:
    """The part `rank` of the division."""
    mine = np.flatnonzero(division.edges == rank)
    own = np.flatnonzero(division.vertices == rank)
    sources, targets = graph.sources[mine], graph.targets[mine]
    halo = _halo(graph, division, rank)
    local = np.full(graph.size, -1, np.int64)
    local[own] = np.arange(len(own))
    local[halo] = len(own) + np.arange(len(halo))
    order = np.lexsort((sources, targets))
    sources, targets = local[sources[order]], local[targets[order]]
    by_target = np.argsort(targets, kind="stable")
    return GraphPart(rank, own, halo, sources[by_target], targets[by_target])


def trades_of(graph: Graph, division: Division) -> Trades:
    """What all parts read of each other."""
    parts = division.parts
    halos = [_halo(graph, division, rank) for rank in range(parts)]
    own_row = np.empty(graph.size, np.int64)
    for rank in range(parts):
        own = np.flatnonzero(division.vertices == rank)
        own_row[own] = np.arange(len(own))
    read_by_others = [np.unique(np.concatenate([halo[division.vertices[halo] == rank] for halo in halos]))
                      for rank in range(parts)]  # fmt: skip
    reads = []
    for rank in range(parts):
        owners = division.vertices[halos[rank]]
        found = []
        for other in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == other)
            found.append((other, np.searchsorted(read_by_others[other], halos[rank][rows]), rows))
        reads.append(found)
    return Trades([own_row[vertices] for vertices in read_by_others], [len(halo) for halo in halos], reads)


def _halo(graph: Graph, division: Division, rank: int) -> np.ndarray:
    mine = division.edges == rank
    ends = np.unique(np.concatenate([graph.sources[mine], graph.targets[mine]]))
    return np.asarray(ends[division.vertices[ends] != rank])
