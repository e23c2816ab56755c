"""Edge fields as weights."""

from __future__ import annotations

import numpy as np

from syncline.errors import DataError, UnknownName
from syncline.graphs.graph import Graph


def edge_weights(graph: Graph, name: str, *, of: str) -> np.ndarray:
    """A field of edges as numbers of 0 or more."""
    if name not in graph.edge_fields:
        raise UnknownName.among("edge field", name, graph.edge_fields)
    weights = np.asarray(graph.edge_fields[name], np.float64)
    if (weights < 0).any():
        edge = int(np.argmax(weights < 0))
        source, target = graph.name(int(graph.sources[edge])), graph.name(int(graph.targets[edge]))
        raise DataError(
            f"The edge from {source} to {target} (edge {edge:,}) has the {name} {weights[edge]:g}, but {of} needs "
            "weights of 0 or more.", code="negative-weight", edge=edge, weight=float(weights[edge]),
        )  # fmt: skip
    return weights
