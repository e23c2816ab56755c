"""Connected components: the smallest number travels along edges (weakly connected, if they are directed)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def components(graph: Graph, **settings: Any) -> GraphResult:
    """The component of each vertex: the number of its first vertex. Directions of edges do not matter."""

    def update(v: Any) -> Any:
        return np.minimum(v.value, v.gather("in", lambda e: e.source.value, reduce="min"))

    program = VertexProgram(
        name="components",
        update=update,
        consistency="vertex",
        schedule="fifo",
        initial=lambda g: np.arange(g.size),
        until=0,
    )
    return dataclasses.replace(run(program, graph.undirected(), **settings), graph=graph)
