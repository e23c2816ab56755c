"""What a program says about an edge, recorded and computed later for many edges at once.

`lambda e: e.source.value / e.source.out_degree` is called once a round, not once an edge: `e.source.value` is an
`Expression`, and so is whatever NumPy makes of it. An expression of the neighbor alone is computed once for each
vertex, and its sum over edges is a product with a sparse matrix; others are computed for each edge.

Here: expressions, and the edge that a program sees. Not here: sums over edges (`gathering.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from syncline.errors import UnknownName

NEIGHBOR, OWN, EDGE = "neighbor", "own", "edge"


class Places(NamedTuple):
    """For some edges: the vertex at the other end, the own vertex, and the number of the edge."""

    neighbor: Any
    own: Any
    edge: Any


EVERYWHERE = Places(slice(None), slice(None), slice(None))
"""All vertices, or all edges: where an expression of one kind is computed once for each."""


class Expression(NDArrayOperatorsMixin):
    """A computation on the fields of the two ends of an edge, and of the edge."""

    def __init__(self, compute: Callable[[Places], Any], kinds: frozenset[str], product: tuple[Any, Any] | None = None):
        self.compute = compute
        self.kinds = kinds
        """Which of the two ends and the edge it depends on."""
        self.product = product
        """The factors, if it is a product of a field of the edge and an expression of the neighbor."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options.get("out") is not None:
            return NotImplemented
        made = _combined(ufunc, inputs, options)
        if ufunc is np.multiply:
            edge, neighbor = (_of_kind(inputs, kind) for kind in (EDGE, NEIGHBOR))
            if edge is not None and neighbor is not None:
                made.product = (edge, neighbor)
        return made

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, options: Mapping[str, Any]
    ) -> Any:
        del types
        return _combined(function, args, options)

    def __getitem__(self, key: Any) -> Expression:
        """Rows are edges: `value[:, 0]` is the first column of a field."""
        return _combined(lambda array: array[key], (self,), {})

    def __getattr__(self, name: str) -> Callable[..., Expression]:
        """Methods of arrays, such as `.sum(axis=1)` and `.astype(float)`."""
        if name.startswith("_") or not callable(getattr(np.ndarray, name, None)):
            raise AttributeError(f"What is gathered has no attribute {name!r}; use the functions of NumPy on it.")
        return lambda *args, **options: _combined(lambda array: getattr(array, name)(*args, **options), (self,), {})

    def __bool__(self) -> bool:
        raise TypeError("What is gathered holds many edges, so it is neither true nor false. Use np.where(...).")


def field(array: np.ndarray, kind: str) -> Expression:
    """The values of a field at one of the ends, or of the edge."""
    return Expression(lambda places: array[getattr(places, kind)], frozenset([kind]))


def _of_kind(inputs: tuple[Any, ...], kind: str) -> Expression | None:
    return next((i for i in inputs if isinstance(i, Expression) and i.kinds == {kind}), None)


def _combined(function: Callable[..., Any], inputs: Any, options: Mapping[str, Any]) -> Expression:
    kinds: frozenset[str] = frozenset().union(*(i.kinds for i in inputs if isinstance(i, Expression)))

    def compute(places: Places) -> Any:
        return function(*(i.compute(places) if isinstance(i, Expression) else i for i in inputs), **options)

    return Expression(compute, kinds)


class End:
    """One end of an edge: its value and the fields of the graph's nodes."""

    def __init__(self, fields: Mapping[str, Callable[[], np.ndarray]], kind: str) -> None:
        self._fields, self._kind = fields, kind

    def __getattr__(self, name: str) -> Expression:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._fields:
            raise UnknownName.among("field of vertices", name, self._fields)
        return field(self._fields[name](), self._kind)


class Edge:
    """What a program sees of the edges that it gathers: `e.source.F`, `e.target.F`, `e.F` and `e.reverse.F`.

    `e.neighbor` is the end that is not the own vertex, in either direction.
    """

    def __init__(
        self, ends: Mapping[str, Callable[[], np.ndarray]], fields: Mapping[str, np.ndarray], direction: str,
        reverse: Callable[[], np.ndarray],
    ) -> None:  # fmt: skip
        self.neighbor, self.own = End(ends, NEIGHBOR), End(ends, OWN)
        self.source, self.target = (self.neighbor, self.own) if direction == "in" else (self.own, self.neighbor)
        self._fields, self._reverse = fields, reverse

    @property
    def reverse(self) -> ReverseEdge:
        """The edge in the other direction."""
        return ReverseEdge(self._fields, self._reverse())

    def __getattr__(self, name: str) -> Expression:
        return field(_named(self._fields, name), EDGE)


class ReverseEdge:
    """The fields of the edges in the other direction, by the number of the edge itself."""

    def __init__(self, fields: Mapping[str, np.ndarray], numbers: np.ndarray) -> None:
        self._fields, self._numbers = fields, numbers

    def __getattr__(self, name: str) -> Expression:
        array, numbers = _named(self._fields, name), self._numbers
        return Expression(lambda places: array[numbers[places.edge]], frozenset([EDGE]))


def _named(fields: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name.startswith("_"):
        raise AttributeError(name)
    if name not in fields:
        raise UnknownName.among("field of edges", name, fields)
    return fields[name]
