"""`Graph`: vertices and directed edges with fields, checked when it is made.

Here: the graph and its checks. Not here: files and names (`reading.py`), the graphs of other libraries (`foreign.py`),
dividing it over workers (`partition.py`), computing on it (`execution.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from syncline.config.amounts import bytes_of
from syncline.errors import ConfigError, DataError
from syncline.graphs.adjacency import Adjacency

__all__ = ["Graph"]

_BYTES_PER_EDGE = 64
"""Both orders of the edges (16 bytes each), the edges themselves (16), and what sorting takes for a moment."""
_BYTES_PER_VERTEX = 64


class Graph:
    """A directed graph with fields; an undirected one has each edge in both directions.

    `edges` is an array of shape (2, edges) as in PyTorch Geometric, a pair of arrays (sources, targets), or a list of
    pairs. Vertices are numbered from 0, or have `names`: then edges may name them. `nodes` and `edge_fields` map names
    to arrays with one row for each; a field of vertices may be a sparse matrix of scipy.

    >>> g = syncline.Graph(edges=[("a", "b"), ("b", "c"), ("a", "c")])
    >>> g.size, g.edge_count, g.out_degree.tolist()
    (3, 3, [2, 1, 0])
    """

    def __init__(
        self,
        edges: Any,
        nodes: Mapping[str, Any] | None = None,
        *,
        edge_fields: Mapping[str, Any] | None = None,
        names: Sequence[Hashable] | None = None,
        size: int | None = None,
        directed: bool = True,
        memory_limit: str | float | None = None,
    ) -> None:
        ends, names = _read_ends(edges, names)
        self.nodes = {name: _checked(_as_field(field), f"the node field {name!r}") for name, field in
                      (nodes or {}).items()}  # fmt: skip
        self.size = _size(ends, names, self.nodes, size)
        self.names = names
        _check_names(names)
        self.directed = directed
        fields = {name: np.asarray(field) for name, field in (edge_fields or {}).items()}
        _check_memory(self.size, ends.shape[1] * (1 if directed else 2), memory_limit)
        _check_ends(ends, self.size)
        for name, field in fields.items():
            if len(field) != ends.shape[1]:
                raise DataError(
                    f"The edge field {name!r} has {len(field):,} values for {ends.shape[1]:,} edges. It needs one for "
                    "each edge.", code="field-length", field=name, values=len(field), edges=ends.shape[1],
                )  # fmt: skip
            _checked(field, f"the edge field {name!r}")
        if not directed:
            is_loop = ends[0] == ends[1]  # a loop is its own reverse
            back = ends[::-1, ~is_loop]
            fields = {name: np.concatenate([field, field[~is_loop]]) for name, field in fields.items()}
            ends = np.concatenate([ends, back], axis=1)
        self.sources, self.targets = np.ascontiguousarray(ends[0]), np.ascontiguousarray(ends[1])
        self.edge_fields = fields

    @classmethod
    def of(cls, source: Any, **options: Any) -> Graph:
        """The graph in a file or folder, of a name ('cora', 'debian'), or of networkx, PyTorch Geometric or DGL.

        Options for files: `directed` and `memory_limit`. See `graphs/reading.py` for the formats.
        """
        from syncline.graphs.foreign import as_graph  # which makes graphs of this class

        return as_graph(source, **options)

    @property
    def edge_count(self) -> int:
        """How many directed edges there are; an undirected edge counts twice."""
        return len(self.sources)

    @cached_property
    def into(self) -> Adjacency:
        """The edges by target."""
        return Adjacency.of(self.targets, self.sources, self.size)

    @cached_property
    def out_of(self) -> Adjacency:
        """The edges by source."""
        return Adjacency.of(self.sources, self.targets, self.size)

    @property
    def out_degree(self) -> np.ndarray:
        return self.out_of.degrees

    @property
    def in_degree(self) -> np.ndarray:
        return self.into.degrees

    @cached_property
    def reverse(self) -> np.ndarray:
        """For each edge the number of the edge in the other direction; ConfigError if one has none."""
        forward, backward = self._keys(self.sources, self.targets), self._keys(self.targets, self.sources)
        order = np.argsort(forward, kind="stable")
        place = np.minimum(np.searchsorted(forward[order], backward), max(len(order) - 1, 0))
        found = order[place] if len(order) else order
        if not np.array_equal(forward[found], backward):
            raise ConfigError("An edge of this graph has no reverse. Use graph.undirected().", code="no-reverse-edge")
        return found

    def undirected(self) -> Graph:
        """The simple undirected graph: each pair of neighbors once in both directions, no loops.

        A field of parallel edges keeps the first value of each pair.
        """
        low, high = np.minimum(self.sources, self.targets), np.maximum(self.sources, self.targets)
        proper = np.flatnonzero(low != high)
        _, first = np.unique(self._keys(low, high)[proper], return_index=True)
        kept = proper[first]
        return Graph(
            (low[kept], high[kept]),
            self.nodes,
            edge_fields={name: field[kept] for name, field in self.edge_fields.items()},
            names=self.names,
            size=self.size,
            directed=False,
        )

    def with_fields(self, nodes: Mapping[str, Any], edges: Mapping[str, Any]) -> Graph:
        """The same graph with more fields, or others; it shares all else with this one."""
        _ = self.into  # sorted once, for this graph and the copy
        made = copy.copy(self)
        made.nodes = {**self.nodes, **{name: _as_field(field) for name, field in nodes.items()}}
        made.edge_fields = {**self.edge_fields, **{name: np.asarray(field) for name, field in edges.items()}}
        return made

    @cached_property
    def numbers(self) -> dict[Hashable, int]:
        """The number of each vertex by name."""
        return {name: number for number, name in enumerate(self.names or range(self.size))}

    def number(self, vertex: Hashable) -> int:
        """The number of a vertex, given by name or number."""
        if vertex in self.numbers:
            return self.numbers[vertex]
        if isinstance(vertex, int | np.integer) and 0 <= vertex < self.size:
            return int(vertex)
        text = str(vertex)
        if text.isascii() and text.isdigit() and len(text) < 19 and int(text) < self.size:
            return int(text)
        raise ConfigError(
            f"The graph has no vertex {vertex!r}. Give a name, or a number from 0 to {self.size - 1:,}.",
            code="no-vertex", vertex=vertex,
        )  # fmt: skip

    def name(self, number: int) -> str:
        """The name of a vertex, or its number if vertices have no names."""
        return str(self.names[number] if self.names is not None else number)

    def _keys(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.asarray(first * np.int64(self.size) + second)

    def __repr__(self) -> str:
        fields = [*self.nodes, *(f"{name} (edges)" for name in self.edge_fields)]
        kind = "directed" if self.directed else "undirected"
        return f"Graph({self.size:,} vertices, {self.edge_count:,} {kind} edges; fields: {', '.join(fields) or 'none'})"


def _read_ends(edges: Any, names: Sequence[Hashable] | None) -> tuple[np.ndarray, Sequence[Hashable] | None]:
    """Sources and targets as int64 of shape (2, edges), and the names of vertices, if they have any."""
    array = np.asarray(edges) if not _is_list_of_pairs(edges) else _from_pairs(edges)
    if array.size == 0:
        return np.zeros((2, 0), np.int64), names
    if array.ndim != 2 or 2 not in array.shape:
        raise ConfigError(
            f"edges has the shape {array.shape}, but must be (2, edges): the sources and the targets.",
            code="edge-shape", shape=array.shape,
        )  # fmt: skip
    if array.shape[0] != 2:
        array = array.T
    if array.dtype.kind in "iu" and names is None:
        return array.astype(np.int64), None
    if array.dtype.kind == "f":
        raise ConfigError("edges has fractions, but vertices are numbers from 0 or names.", code="edge-type")
    return _numbered(array, names)


def _is_list_of_pairs(edges: Any) -> bool:
    return isinstance(edges, list) and all(isinstance(edge, tuple) for edge in edges)


def _from_pairs(edges: list[tuple[Any, ...]]) -> np.ndarray:
    for number, edge in enumerate(edges):
        if len(edge) != 2:
            raise ConfigError(
                f"Edge {number} is {edge!r}, but must be a pair (source, target). Give weights as edge_fields.",
                code="edge-shape", edge=number,
            )  # fmt: skip
    if all(isinstance(end, int | np.integer) for edge in edges for end in edge):
        return np.array(edges, np.int64).reshape(-1, 2).T
    return np.array([[str(end) for end in edge] for edge in edges]).T


def _numbered(ends: np.ndarray, names: Sequence[Hashable] | None) -> tuple[np.ndarray, Sequence[Hashable]]:
    """The numbers of named vertices. Without `names`, those of the edges in alphabetical order."""
    if names is None:
        found, numbers = np.unique(ends, return_inverse=True)
        return numbers.reshape(ends.shape).astype(np.int64), found.tolist()
    if ends.dtype.kind in "iu" and not any(isinstance(name, int | np.integer) for name in names):
        return ends.astype(np.int64), names  # edges by number, names for people
    known = {name: number for number, name in enumerate(names)}
    numbers = np.array([known.get(end, -1) for end in ends.ravel().tolist()], np.int64).reshape(ends.shape)
    if (numbers < 0).any():
        row, edge = (int(place) for place in np.argwhere(numbers < 0)[0])
        why = f"none of the {len(names):,} vertices has that name"
        raise _missing(edge, ("source", "target")[row], ends[row].tolist()[edge], why)
    return numbers, names


def _size(ends: np.ndarray, names: Sequence[Any] | None, nodes: Mapping[str, np.ndarray], size: int | None) -> int:
    lengths = {f"the node field {name!r}": _rows(field) for name, field in nodes.items()}
    if names is not None:
        lengths["names"] = len(names)
    if size is not None:
        lengths["size"] = size
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise DataError(
            f"The graph's vertices are counted differently: {described}. All must have one row for each vertex.",
            code="field-length", lengths=lengths,
        )  # fmt: skip
    if lengths:
        return next(iter(lengths.values()))
    return int(ends.max()) + 1 if ends.size else 0


def _check_ends(ends: np.ndarray, size: int) -> None:
    if not ends.size or (int(ends.min()) >= 0 and int(ends.max()) < size):
        return
    row, edge = (int(place) for place in np.argwhere((ends < 0) | (ends >= size))[0])
    raise _missing(edge, ("source", "target")[row], int(ends[row, edge]),
                   f"the graph has {size:,} vertices, numbered from 0")  # fmt: skip


def _missing(edge: int, end: str, vertex: Any, why: str) -> DataError:
    return DataError(
        f"Edge {edge:,} has the {end} {vertex!r}, but {why}. Add the vertex, or remove the edge.",
        code="edge-to-missing-node", edge=edge, end=end, vertex=vertex,
    )  # fmt: skip


def _as_field(field: Any) -> Any:
    """An array, or a sparse matrix of scipy with a row for each vertex, in compressed rows."""
    return field.tocsr() if hasattr(field, "tocsr") else np.asarray(field)


def _rows(field: Any) -> int:
    return int(field.shape[0])


def _checked(field: Any, what: str) -> Any:
    """A field without NaN, which would spread to every vertex that can be reached."""
    if hasattr(field, "indptr"):
        is_nan = np.isnan(field.data)
        if is_nan.any():
            rows = np.unique(np.searchsorted(field.indptr, np.flatnonzero(is_nan), side="right") - 1)
            raise _nan(what, int(rows[0]), len(rows), _rows(field))
        return field
    if field.ndim == 0:
        raise DataError(f"{what.capitalize()} is a single value, but needs one for each row.", code="field-length")
    if field.dtype.kind == "f":
        is_nan = np.isnan(field).reshape(len(field), -1).any(axis=1)
        if is_nan.any():
            raise _nan(what, int(np.argmax(is_nan)), int(is_nan.sum()), len(field))
    return field


def _nan(what: str, first: int, count: int, rows: int) -> DataError:
    return DataError(
        f"{what[0].upper()}{what[1:]} is NaN in {count:,} of {rows:,} rows, first in row {first:,}. Fill or remove "
        "them: NaN would spread to every vertex that can be reached.",
        code="nan-in-field", field=what, row=first, count=count,
    )  # fmt: skip


def _check_names(names: Sequence[Hashable] | None) -> None:
    if names is None or len(set(names)) == len(names):
        return
    seen: set[Hashable] = set()
    for row, name in enumerate(names):
        if name in seen:
            raise DataError(
                f"Two vertices have the name {name!r}, the second in row {row:,}. Names must differ.",
                code="duplicate-node", name=name, row=row,
            )  # fmt: skip
        seen.add(name)


def _check_memory(size: int, edges: int, limit: str | float | None) -> None:
    if limit is None:
        return
    allowed, needed = bytes_of("memory_limit", limit), size * _BYTES_PER_VERTEX + edges * _BYTES_PER_EDGE
    if needed > allowed:
        raise DataError(
            f"A graph of {size:,} vertices and {edges:,} edges needs about {needed / 1e6:,.1f} MB besides its fields, "
            f"more than the memory limit of {allowed / 1e6:,.1f} MB. Raise the limit, or compute on a part of the "
            "graph.", code="graph-too-large", needed=needed, limit=allowed,
        )  # fmt: skip
