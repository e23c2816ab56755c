"""Graphs of other libraries: networkx, PyTorch Geometric and DGL, recognized by what they offer, never imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from syncline.errors import ConfigError
from syncline.graphs.graph import Graph
from syncline.graphs.reading import read_graph


def as_graph(source: Any, **options: Any) -> Graph:
    """A `Graph` from a Graph, a path, a name, or a graph of networkx, PyTorch Geometric (`Data`) or DGL."""
    if isinstance(source, Graph):
        return source
    if isinstance(source, str | Path):
        return read_graph(source, **options)
    if hasattr(source, "edge_index"):
        return _from_pyg(source, options)
    if hasattr(source, "adjacency") and hasattr(source, "is_directed"):
        return _from_networkx(source, options)
    if hasattr(source, "ndata") and hasattr(source, "edges"):
        return _from_dgl(source, options)
    raise ConfigError(
        f"A {type(source).__name__} is not a graph. Give a path, a name, or a graph of networkx, PyTorch Geometric or "
        "DGL; for arrays use syncline.Graph(edges=...).", code="not-a-graph", type=type(source).__name__,
    )  # fmt: skip


def is_graph(source: Any) -> bool:
    """Whether this is a graph, of this or another library; not a path or name."""
    return isinstance(source, Graph) or hasattr(source, "edge_index") or (
        hasattr(source, "adjacency") and hasattr(source, "is_directed")
    ) or (hasattr(source, "ndata") and hasattr(source, "edges"))  # fmt: skip


def _from_networkx(source: Any, options: dict[str, Any]) -> Graph:
    """Attributes that all nodes, or all edges, have become fields."""
    names = list(source.nodes)
    number = {name: place for place, name in enumerate(names)}
    edges = list(source.edges(data=True))
    ends = np.array([[number[a], number[b]] for a, b, _ in edges], np.int64).reshape(-1, 2).T
    return Graph(
        ends,
        _common([attributes for _, attributes in source.nodes(data=True)]),
        edge_fields=_common([attributes for *_, attributes in edges]),
        names=None if names == list(range(len(names))) else [str(name) for name in names],
        size=len(names),
        **{**options, "directed": source.is_directed()},
    )


def _common(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    shared = set.intersection(*(set(row) for row in rows)) if rows else set()
    return {str(name): np.array([row[name] for row in rows]) for name in sorted(shared, key=str)}


def _from_pyg(source: Any, options: dict[str, Any]) -> Graph:
    ends = _array(source.edge_index)
    size = int(source.num_nodes)
    nodes, edges = {}, {}
    for name in source.keys() if callable(source.keys) else source.keys:
        value = source[name]
        if name in ("edge_index", "num_nodes") or not hasattr(value, "shape") or not len(value.shape):
            continue
        if name.startswith("edge_") and len(value) == ends.shape[1]:
            edges[name.removeprefix("edge_")] = _array(value)
        elif len(value) == size:
            nodes[name] = _array(value)
    return Graph(ends, nodes, edge_fields=edges, size=size, **options)


def _from_dgl(source: Any, options: dict[str, Any]) -> Graph:
    first, second = source.edges()
    nodes = {name: _array(value) for name, value in source.ndata.items()}
    edges = {name: _array(value) for name, value in source.edata.items()}
    ends = np.stack([_array(first), _array(second)])
    return Graph(ends, nodes, edge_fields=edges, size=int(source.num_nodes()), **options)


def _array(tensor: Any) -> np.ndarray:
    for step in ("detach", "cpu", "numpy"):
        if hasattr(tensor, step):
            tensor = getattr(tensor, step)()
    return np.asarray(tensor)
