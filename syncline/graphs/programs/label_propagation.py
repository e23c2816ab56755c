"""Label propagation: each vertex takes the label that most of its neighbors have.

As communities (G. Cordasco and L. Gargano, 2010: semi-synchronous, color by color, so that labels do not oscillate), or
from some known labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from syncline.errors import ConfigError
from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run

_UNKNOWN = -1


def label_propagation(
    graph: Graph, *, labels: Mapping[Hashable, int] | None = None, max_rounds: int = 1000, **settings: Any
) -> GraphResult:
    """The label of each vertex; without `labels`, each begins with its own number. Directions do not matter.

    `labels` gives the labels, from 0, of some vertices, which keep them; others begin with -1, which does not spread.
    Of several most frequent labels a vertex keeps its own if it is one of them, else it takes the largest.
    """
    is_known = np.zeros(graph.size, bool)
    initial = np.arange(graph.size) if labels is None else np.full(graph.size, _UNKNOWN)
    for vertex, label in (labels or {}).items():
        if label < 0:
            raise ConfigError.for_setting("labels", label, "0 or more for each vertex", vertex=vertex)
        initial[graph.number(vertex)], is_known[graph.number(vertex)] = label, True

    def update(v: Any) -> Any:
        found = v.gather("in", lambda e: np.where(e.source.value < 0, -2 - e.source.number, e.source.value), "mode")
        # Unknown labels count once each, as something that no two neighbors have in common.
        known = v.gather("in", lambda e: e.source.value, reduce="max")
        return np.where(is_known[v.numbers], v.value, np.where(found < 0, np.maximum(v.value, known), found))

    def plain(v: Any) -> Any:
        return v.gather("in", lambda e: e.source.value, reduce="mode")

    program = VertexProgram(
        name="label-propagation",
        update=plain if labels is None else update,
        consistency="edge",
        schedule="sweep",
        initial=initial,
        until=0,
    )
    return dataclasses.replace(run(program, graph.undirected(), max_rounds=max_rounds, **settings), graph=graph)
