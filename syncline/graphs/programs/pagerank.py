"""PageRank, also personalized (S. Brin and L. Page, 1998).

The ranks are the solution of x = (1 - d) t + d P x, divided by their sum; P follows an edge at random. A walker at a
vertex without edges starts again from t. That is what the division by the sum amounts to, so that no vertex needs to
know of those without edges (A. Langville and C. Meyer, Internet Mathematics 1(3), 2004, section 8.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from syncline.errors import ConfigError
from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.programs.weights import edge_weights
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def pagerank(
    graph: Graph,
    *,
    damping: float = 0.85,
    personal: Mapping[Hashable, float] | None = None,
    weight: str | None = None,
    until: float = 1e-9,
    **settings: Any,
) -> GraphResult:
    """The rank of each vertex; ranks sum to 1. `until` is how much the last round of a sweep may change them in sum.

    With the schedules fifo and priority, it bounds the sum of all errors.

    `personal` gives the vertices where a walker starts, by name or number, with their shares. `weight` names an edge
    field: how likely each edge is taken, relative to the others of its source.
    """
    if not 0 < damping < 1:
        raise ConfigError.for_setting("damping", damping, "between 0 and 1")
    if graph.size == 0:
        raise ConfigError("The graph has no vertices.", code="empty-graph")
    start = _starts(graph, personal)
    shares = _shares(graph, weight)
    if weight is None:

        def update(v: Any) -> Any:
            return v.start + v.gather("in", lambda e: e.source.value * e.source.share)
    else:

        def update(v: Any) -> Any:
            return v.start + v.gather("in", lambda e: e.source.value * e.share)

    # What is pending adds up to at most 1 / (1 - d) times as much when it has reached all vertices.
    least = until if settings.get("schedule") in (None, "sweep", "chromatic") else until * (1 - damping)
    program = VertexProgram(
        name="pagerank", update=update, consistency="vertex", initial=start.copy(), until=least, is_relative=True
    )
    starts, fields = {"start": (1 - damping) * start}, {"share": damping * shares}
    computed = graph.with_fields({**starts, **fields}, {}) if weight is None else graph.with_fields(starts, fields)
    found = run(program, computed, **settings)
    return dataclasses.replace(found, graph=graph, values=found.values / found.values.sum())


def _starts(graph: Graph, personal: Mapping[Hashable, float] | None) -> np.ndarray:
    if personal is None:
        return np.full(graph.size, 1 / graph.size)
    start = np.zeros(graph.size)
    for vertex, share in personal.items():
        if not 0 <= share < np.inf:
            raise ConfigError.for_setting("personal", share, "0 or a positive number for each vertex", vertex=vertex)
        start[graph.number(vertex)] += share
    if not start.sum():
        raise ConfigError("personal gives no vertex a share above 0.", code="invalid-setting", setting="personal")
    return np.asarray(start / start.sum())


def _shares(graph: Graph, weight: str | None) -> np.ndarray:
    """The probability of each edge: by source if all edges of a vertex are equal, else by edge."""
    if weight is None:
        return np.asarray(1 / np.maximum(graph.out_degree, 1))
    weights = edge_weights(graph, weight, of="PageRank")
    sums = np.bincount(graph.sources, weights=weights, minlength=graph.size)[graph.sources]
    return np.asarray(np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0))
