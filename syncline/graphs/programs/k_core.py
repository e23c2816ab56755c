"""K-core: in how dense a part of the graph each vertex is.

A vertex's core number is the largest h for which h neighbors have a core number of h or more, so it is what repeated
h-indices of the neighbors, from their degrees, end in (L. Lü et al., Nature Communications 7, 2016).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def k_core(graph: Graph, **settings: Any) -> GraphResult:
    """The core number of each vertex. Directions, parallel edges and loops do not count."""

    def update(v: Any) -> Any:
        return v.gather("in", lambda e: e.source.value, reduce="h_index")

    program = VertexProgram(
        name="k-core", update=update, consistency="vertex", schedule="fifo", initial=lambda g: g.out_degree, until=0
    )
    return dataclasses.replace(run(program, graph.undirected(), **settings), graph=graph)
