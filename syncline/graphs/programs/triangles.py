"""Triangles: how many each vertex is in.

Every edge points from the vertex of lower degree to the other one, so that few edges leave any vertex; each pair of
edges that leave one vertex is a triangle if the third side exists (M. Latapy, 2008).
"""

from __future__ import annotations

import time

import numpy as np

from syncline import boundary
from syncline.graphs.adjacency import Adjacency
from syncline.graphs.graph import Graph
from syncline.graphs.result import GraphResult

_PAIRS_AT_ONCE = 1 << 21


@boundary.guarding()
def triangles(graph: Graph) -> GraphResult:
    """The number of triangles of each vertex; their sum is three times the number of triangles. One pass, one worker.

    Directions, parallel edges and loops do not count.
    """
    started = time.perf_counter()
    simple = graph.undirected()
    size = graph.size
    rank = np.empty(size, np.int64)
    rank[np.argsort(simple.out_degree, kind="stable")] = np.arange(size)
    forward = rank[simple.sources] < rank[simple.targets]
    sources, targets = simple.sources[forward], simple.targets[forward]
    keys = np.sort(sources * np.int64(size) + targets)
    sources, targets = np.divmod(keys, max(size, 1))
    leaving = Adjacency.of(sources, targets, size)
    counts, pairs = np.zeros(size, np.int64), 0
    # For each edge u -> v all edges u -> w: a triangle if v -> w is an edge.
    ends = np.cumsum(leaving.degrees[sources])
    start = 0
    while start < len(sources):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _PAIRS_AT_ONCE, side="right")))
        places, lengths = leaving.pick(sources[start:stop])
        first, middle = np.repeat(sources[start:stop], lengths), np.repeat(targets[start:stop], lengths)
        last = leaving.others[places]
        wanted = middle * np.int64(size) + last
        found = keys[np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)] == wanted
        for corner in (first, middle, last):
            counts += np.bincount(corner[found], minlength=size)
        pairs += len(places)
        start = stop
    return GraphResult(
        graph=graph, values=counts, converged=True, rounds=1, updates=size, edge_updates=pairs,
        seconds=time.perf_counter() - started, workers=1, facts={},
    )  # fmt: skip
