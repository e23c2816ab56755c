"""Dividing a graph into parts: by vertices (edge cuts) or by edges (vertex cuts), with what the cut costs.

Here: pure functions of the graph, and their report. METIS is used if pymetis is installed. Not here: computing on a
part (`part.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from syncline.errors import ConfigError, UnknownName
from syncline.graphs.graph import Graph

_AT_ONCE = 2048
"""HDRF places so many edges at once: each sees where the edges before its block are."""


@dataclass(frozen=True)
class Division:
    """The part of each vertex and of each edge.

    In an edge cut, an edge belongs to the part of its target. In a vertex cut, a vertex belongs to the part that has
    most of its edges, and other parts with edges of it have copies.
    """

    method: str
    parts: int
    vertices: np.ndarray
    edges: np.ndarray
    cuts_vertices: bool
    copies: int
    """How many vertices have to be known in parts that they do not belong to, summed over parts."""

    @property
    def balance(self) -> float:
        """The edges of the largest part, relative to the mean."""
        counts = np.bincount(self.edges, minlength=self.parts)
        return float(counts.max() / counts.mean()) if len(self.edges) else 1.0

    def cut_edges(self, graph: Graph) -> int:
        """How many edges have their ends in different parts."""
        return int((self.vertices[graph.sources] != self.vertices[graph.targets]).sum())

    def halo_bytes(self, bytes_per_vertex: int) -> int:
        """What a round over all vertices sends: each copy's value, and in a vertex cut its part of the sum, too."""
        return self.copies * bytes_per_vertex * (2 if self.cuts_vertices else 1)

    def report(self, graph: Graph) -> dict[str, float]:
        return {
            "balance": self.balance,
            "cut_edges": self.cut_edges(graph),
            "cut_share": self.cut_edges(graph) / max(graph.edge_count, 1),
            "copies": self.copies,
            "replication": 1 + self.copies / max(graph.size, 1),
            "halo_bytes": self.halo_bytes(8),
        }


def divide(graph: Graph, parts: int, method: str = "blocks") -> Division:
    """Divide a graph into `parts`.

    Edge cuts: "greedy" (few edges between parts), "blocks" (ranges of vertices with equally many edges), "hash",
    "metis". Vertex cuts: "vertex-cut" (HDRF),
    "vertex-hash".
    """
    if parts < 1:
        raise ConfigError.for_setting("parts", parts, "1 or more")
    if method in _EDGE_CUTS:
        return _edge_cut(graph, parts, method, _EDGE_CUTS[method](graph, parts))
    if method in _VERTEX_CUTS:
        return _vertex_cut(graph, parts, method, _VERTEX_CUTS[method](graph, parts))
    raise UnknownName.among("partitioner", method, METHODS)


def check_method(method: str) -> None:
    """Refuse a partitioner that does not exist, or is not installed."""
    if method not in METHODS:
        raise UnknownName.among("partitioner", method, METHODS)
    if method == "metis" and find_spec("pymetis") is None:
        raise _no_metis()


def _no_metis() -> ConfigError:
    return ConfigError(
        "The partitioner 'metis' needs pymetis, which is not installed: pip install pymetis. Or use 'blocks'.",
        code="no-metis",
    )


def _edge_cut(graph: Graph, parts: int, method: str, owners: np.ndarray) -> Division:
    edges = owners[graph.targets]
    is_cut = owners[graph.sources] != edges
    pairs = np.unique(graph.sources[is_cut] * np.int64(parts) + edges[is_cut])
    return Division(method, parts, owners, edges, False, len(pairs))


def _vertex_cut(graph: Graph, parts: int, method: str, edges: np.ndarray) -> Division:
    counts = np.zeros((graph.size, parts), np.int64)
    np.add.at(counts, (graph.sources, edges), 1)
    np.add.at(counts, (graph.targets, edges), 1)
    present = (counts > 0).sum(axis=1)
    alone = np.arange(graph.size) % parts
    owners = np.where(present > 0, counts.argmax(axis=1), alone)
    return Division(method, parts, owners, edges, True, int(np.maximum(present - 1, 0).sum()))


def _blocks(graph: Graph, parts: int) -> np.ndarray:
    weight = np.cumsum(graph.in_degree + 1)
    total = int(weight[-1]) if graph.size else 0
    return np.asarray(np.minimum((weight - 1) * parts // max(total, 1), parts - 1), np.int64)


_ROUNDS, _MOST_BALANCE, _SWITCHED = 30, 1.05, 0.5


def _greedy(graph: Graph, parts: int) -> np.ndarray:
    """Blocks of an order in which neighbors are near each other (E. Cuthill and J. McKee, 1969), then rounds in which
    vertices move to the part with most of their neighbors, as long as the parts keep their sizes."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    simple = graph.undirected()
    matrix = simple.into.ones
    order = reverse_cuthill_mckee(matrix, symmetric_mode=True)
    weight = simple.in_degree + 1.0
    total = np.cumsum(weight[order])
    owners = np.empty(graph.size, np.int64)
    owners[order] = np.minimum((total - weight[order]) * parts // max(total[-1] if graph.size else 1, 1), parts - 1)
    random = np.random.RandomState(0)
    most = _MOST_BALANCE * weight.sum() / parts
    for _ in range(_ROUNDS if parts > 1 and simple.edge_count else 0):
        near = matrix @ np.eye(parts)[owners]
        gain = near - near[np.arange(graph.size), owners][:, None]
        wanted = gain.argmax(axis=1)
        moving = np.flatnonzero((gain.max(axis=1) > 0) & (random.random_sample(graph.size) < _SWITCHED))
        moving = moving[np.argsort(-gain[moving, wanted[moving]], kind="stable")]
        if not len(moving):
            continue
        owners = _moved(owners, wanted, moving, weight, most, parts)
    return owners


def _moved(
    owners: np.ndarray, wanted: np.ndarray, moving: np.ndarray, weight: np.ndarray, most: float, parts: int
) -> np.ndarray:
    """The parts after moving vertices, best first, into parts that have room for them."""
    sizes, owners = np.bincount(owners, weight, minlength=parts), owners.copy()
    for part in range(parts):
        into = moving[wanted[moving] == part]
        fits = into[sizes[part] + np.cumsum(weight[into]) <= most]
        owners[fits] = part
    return owners


def _hash(graph: Graph, parts: int) -> np.ndarray:
    return _hashed(np.arange(graph.size, dtype=np.uint64), parts)


def _hashed(numbers: np.ndarray, parts: int) -> np.ndarray:
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return np.asarray((mixed ^ (mixed >> np.uint64(32))) % np.uint64(parts)).astype(np.int64)


def _metis(graph: Graph, parts: int) -> np.ndarray:
    try:
        import pymetis
    except ImportError:
        raise _no_metis() from None
    simple = graph.undirected()
    if parts == 1:
        return np.zeros(graph.size, np.int64)
    _, owners = pymetis.part_graph(parts, xadj=simple.out_of.offsets, adjncy=simple.out_of.others)
    return np.asarray(owners, np.int64)


def _vertex_hash(graph: Graph, parts: int) -> np.ndarray:
    return _hashed((graph.sources * np.int64(graph.size) + graph.targets).astype(np.uint64), parts)


def _hdrf(graph: Graph, parts: int) -> np.ndarray:
    """High-degree replicated first (F. Petroni et al., CIKM 2015): an edge goes where its ends have copies already,
    rather that of lower degree, if that part is not too full. Edges are placed in blocks, in a random order."""
    order = np.random.default_rng(0).permutation(graph.edge_count)
    degree = np.bincount(graph.sources, minlength=graph.size) + np.bincount(graph.targets, minlength=graph.size)
    present = np.zeros((graph.size, parts), bool)
    sizes, owners = np.zeros(parts), np.zeros(graph.edge_count, np.int64)
    for start in range(0, len(order), _AT_ONCE):
        block = order[start : start + _AT_ONCE]
        a, b = graph.sources[block], graph.targets[block]
        share = degree[a] / (degree[a] + degree[b])
        score = present[a] * (2 - share)[:, None] + present[b] * (1 + share)[:, None]
        fullness = (sizes.max() - sizes) / (1 + sizes.max() - sizes.min())
        # Within a block nothing else would spread edges whose ends are nowhere yet.
        spread = np.eye(parts)[np.arange(len(block)) % parts] * 0.5
        chosen = (score + 1.1 * fullness + spread).argmax(axis=1)
        owners[block] = chosen
        present[a, chosen] = present[b, chosen] = True
        sizes += np.bincount(chosen, minlength=parts)
    return owners


_EDGE_CUTS: dict[str, Callable[[Graph, int], np.ndarray]] = {
    "blocks": _blocks, "greedy": _greedy, "hash": _hash, "metis": _metis,
}  # fmt: skip
_VERTEX_CUTS: dict[str, Callable[[Graph, int], np.ndarray]] = {"vertex-cut": _hdrf, "vertex-hash": _vertex_hash}
METHODS = (*_EDGE_CUTS, *_VERTEX_CUTS)
