"""Longest paths in a graph without cycles: how early a vertex can be reached if all before it must be, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from syncline.graphs.cycles import check_acyclic
from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.programs.weights import edge_weights
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def longest_paths(graph: Graph, *, weight: str | None = None, **settings: Any) -> GraphResult:
    """The length of the longest path that ends at each vertex; a cycle is a DataError that names it.

    `weight` names an edge field with the lengths of edges, 0 or more; without, each edge has the length 1.
    """
    check_acyclic(graph, of="Longest paths")
    lengths = np.ones(graph.edge_count) if weight is None else edge_weights(graph, weight, of="longest paths")

    def update(v: Any) -> Any:
        return np.maximum(0.0, v.gather("in", lambda e: e.source.value + e.length, reduce="max"))

    program = VertexProgram(
        name="longest-paths", update=update, consistency="vertex", schedule="fifo", initial=0.0, until=0
    )
    found = run(program, graph.with_fields({}, {"length": lengths}), **settings)
    return dataclasses.replace(found, graph=graph)
