"""Greedy coloring: each vertex takes the smallest color that no neighbor has.

It needs edge consistency: two neighbors that are updated at once would take the same color, and again in every round.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def coloring(graph: Graph, **settings: Any) -> GraphResult:
    """A color from 0 for each vertex, different from those of all its neighbors."""

    def update(v: Any) -> Any:
        return v.gather("in", lambda e: e.source.value, reduce="mex")

    program = VertexProgram(name="coloring", update=update, consistency="edge", schedule="fifo", initial=-1, until=0)
    return dataclasses.replace(run(program, graph.undirected(), **settings), graph=graph)
