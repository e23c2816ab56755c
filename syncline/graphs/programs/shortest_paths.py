"""Shortest paths from one vertex (Bellman and Ford): a vertex whose distance has changed updates its neighbors."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np

from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.programs.weights import edge_weights
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def shortest_paths(graph: Graph, *, source: Hashable, weight: str | None = None, **settings: Any) -> GraphResult:
    """The distance of each vertex from `source`; infinite where no path leads.

    `weight` names an edge field with the lengths of edges, 0 or more; without, each edge has the length 1.
    """
    start = graph.number(source)
    lengths = np.ones(graph.edge_count) if weight is None else edge_weights(graph, weight, of="shortest paths")
    initial = np.full(graph.size, np.inf)
    initial[start] = 0.0

    def update(v: Any) -> Any:
        return np.minimum(v.value, v.gather("in", lambda e: e.source.value + e.length, reduce="min"))

    program = VertexProgram(
        name="shortest-paths", update=update, consistency="vertex", schedule="fifo", initial=initial, until=0
    )
    found = run(program, graph.with_fields({}, {"length": lengths}), **settings)
    return dataclasses.replace(found, graph=graph)
