"""Colors that keep apart what must not be updated at the same time.

Here: a proper coloring of a graph, or of its square, by parallel greedy rounds (M. Jones and P. Plassmann, 1993, with
the largest degree first), a pure function of the graph. Not here: the vertex program that colors a graph for its user
(`programs/coloring.py`).
"""

from __future__ import annotations

import numpy as np

from syncline.errors import ConfigError
from syncline.graphs.adjacency import Adjacency
from syncline.graphs.graph import Graph
from syncline.graphs.reductions import mex

_MOST_PAIRS = 200_000_000
"""The square of a graph may have this many pairs of vertices, 16 bytes each."""


def colors_for(graph: Graph, consistency: str) -> np.ndarray:
    """A color for each vertex: no two neighbors have the same, and for "full" no two with a common neighbor either."""
    if consistency == "vertex":
        return np.zeros(graph.size, np.int64)
    low, high = np.minimum(graph.sources, graph.targets), np.maximum(graph.sources, graph.targets)
    keys = np.unique((low * np.int64(graph.size) + high)[low != high])
    low, high = np.divmod(keys, max(graph.size, 1))
    if consistency == "full":
        low, high = _squared(low, high, graph.size)
    return greedy_colors(Adjacency.of(np.concatenate([low, high]), np.concatenate([high, low]), graph.size))


def greedy_colors(neighbors: Adjacency) -> np.ndarray:
    """Color all vertices: in each round those that come before all their neighbors without a color.

    A vertex takes the smallest color that no neighbor has; vertices of higher degree come first.
    """
    size = len(neighbors.degrees)
    rank = np.empty(size, np.int64)
    # Equal degrees are in random order: in the order of numbers, a path would take a round for each vertex.
    rank[np.lexsort((np.random.default_rng(0).permutation(size), neighbors.degrees))] = np.arange(size)
    colors = np.where(neighbors.degrees > 0, -1, 0)
    rows, others = neighbors.rows, neighbors.others
    while len(rows):  # edges between vertices without a color
        strongest = np.full(size, -1, np.int64)
        np.maximum.at(strongest, rows, rank[others])
        chosen = np.flatnonzero((colors < 0) & (rank > strongest))
        places, lengths = neighbors.pick(chosen)
        colors[chosen] = mex(colors[neighbors.others[places]], lengths)
        is_open = (colors[rows] < 0) & (colors[others] < 0)
        rows, others = rows[is_open], others[is_open]
    last = np.flatnonzero(colors < 0)  # no neighbor without a color is left
    places, lengths = neighbors.pick(last)
    colors[last] = mex(colors[neighbors.others[places]], lengths)
    return colors


def classes(colors: np.ndarray, vertices: np.ndarray | None = None) -> list[np.ndarray]:
    """The vertices (None: all) of each color, in the order of colors; colors that none of them has are left out."""
    numbers = np.arange(len(colors)) if vertices is None else vertices
    order = np.argsort(colors[numbers], kind="stable")
    ends = np.flatnonzero(np.diff(colors[numbers][order])) + 1
    return [part for part in np.split(numbers[order], ends) if len(part)]


def by_color(colors: np.ndarray, vertices: np.ndarray, count: int) -> list[np.ndarray]:
    """Those of these vertices that have each of the colors from 0 to `count` - 1, in their order."""
    own = colors[vertices]
    ends = np.cumsum(np.bincount(own, minlength=count))
    return np.split(vertices[np.argsort(own, kind="stable")], ends[:-1])


def _squared(low: np.ndarray, high: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs at distance one or two."""
    around = Adjacency.of(np.concatenate([low, high]), np.concatenate([high, low]), size)
    pairs = int((around.degrees.astype(np.float64) ** 2).sum())
    if pairs > _MOST_PAIRS:
        raise ConfigError(
            f"consistency='full' keeps vertices with a common neighbor apart: {pairs:,} pairs in this graph, whose "
            f"largest vertex has {int(around.degrees.max()):,} neighbors. At most {_MOST_PAIRS:,} are possible. Use "
            "consistency='edge', which is as strict for programs that write to their own vertex and its edges only.",
            code="too-many-pairs", pairs=pairs,
        )  # fmt: skip
    square = (around.ones @ around.ones + around.ones).tocoo()
    is_low = square.row < square.col
    return square.row[is_low].astype(np.int64), square.col[is_low].astype(np.int64)
