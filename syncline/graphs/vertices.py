"""`Vertices`: what a vertex program sees, many vertices at once.

Here: fields, gather and scatter, random numbers, aggregates. Not here: which vertices, and what becomes of their new
values (`execution.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from syncline.errors import ConfigError, UnknownName
from syncline.graphs.adjacency import Adjacency
from syncline.graphs.expressions import EVERYWHERE, NEIGHBOR, Edge, Expression, Places
from syncline.graphs.graph import Graph
from syncline.graphs.part import Part
from syncline.graphs.reductions import REDUCTIONS

DIRECTIONS = ("in", "out")
_MOST_VALUES = 1 << 22
"""How many numbers are gathered at once; more would not stay in the processor's cache, and could fill the memory."""


@dataclass(frozen=True)
class Gather:
    """A gather of a program, by its place in it: the expression and what is done with it."""

    direction: str
    expression: Expression
    reduce: str

    @property
    def is_linear(self) -> bool:
        """Whether it is a sum of a function of each neighbor, so that changes of neighbors can be added to it."""
        return self.reduce == "sum" and self.expression.kinds == {NEIGHBOR}


@dataclass
class World:
    """What all vertices of a round have in common."""

    part: Part
    arrays: dict[str, np.ndarray]
    """`value` and the node fields that a run has made."""
    edges: dict[str, np.ndarray]
    seed: int
    round: int = 0
    aggregates: dict[str, Any] = field(default_factory=dict)
    edge_updates: int = 0
    gathers: list[Gather] = field(default_factory=list)
    """Those of the last call of the program."""
    known: Callable[[int, np.ndarray], np.ndarray] | None = None
    """Gives the sum of gather k for some vertices without reading their edges, if it is known."""

    def fields(self) -> dict[str, Callable[[], np.ndarray]]:
        """Node fields by name."""
        graph = self.part.graph
        found: dict[str, Callable[[], np.ndarray]] = {
            "out_degree": lambda: graph.out_degree, "in_degree": lambda: graph.in_degree,
            "number": lambda: np.arange(graph.size),
        }  # fmt: skip
        made = {**graph.nodes, **self.arrays}
        return {**found, **{name: partial(made.__getitem__, name) for name in made}}


class Vertices:
    """Some vertices: `v.value` and `v.FIELD` are arrays with one row for each of them."""

    def __init__(self, world: World, numbers: np.ndarray, *, are_all: bool) -> None:
        """`are_all`: every vertex of the graph is updated at once, by all workers together."""
        self.world, self.numbers, self._are_all = world, numbers, are_all
        self._rows: Any = slice(None) if are_all and world.part.is_whole else numbers  # a slice copies nothing
        self.scattered: list[tuple[str, Mapping[str, Expression]]] = []

    @property
    def value(self) -> np.ndarray:
        """The current values."""
        return _read_only(self.world.arrays["value"][self._rows])

    @property
    def graph(self) -> Graph:
        return self.world.part.graph

    @property
    def round(self) -> int:
        return self.world.round

    @property
    def aggregates(self) -> Mapping[str, Any]:
        """What the program's aggregates were before this round."""
        return self.world.aggregates

    def __len__(self) -> int:
        return len(self.numbers)

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_"):
            raise AttributeError(name)
        fields = self.world.fields()
        if name not in fields:
            raise UnknownName.among("field of vertices", name, fields)
        return _read_only(fields[name]()[self._rows])

    def gather(self, direction: str, what: Callable[[Edge], Any], reduce: str = "sum") -> np.ndarray:
        """For each vertex the sum (or another reduction) of `what` over its edges, in or out.

        Reductions: sum, mean, min, max, any, all, mode (most frequent), mex (smallest absent), h_index.
        """
        if reduce not in REDUCTIONS:
            raise UnknownName.among("reduction", reduce, REDUCTIONS)
        expression = self._traced(direction, what)
        world = self.world
        world.gathers.append(Gather(direction, expression, reduce))
        if world.known is not None:
            return world.known(len(world.gathers) - 1, self.numbers)
        rows = world.part.rows(direction)
        if self._are_all and reduce == "sum" and (found := self._product(direction, expression)) is not None:
            world.edge_updates += int(rows.degrees[self.numbers].sum())
            return found
        return self._edge_by_edge(rows, expression, reduce)

    def scatter(self, direction: str, **fields: Callable[[Edge], Any]) -> None:
        """Set fields of the edges, in or out, after the new values have been set: `what` sees the new values."""
        unknown = [name for name in fields if name not in self.world.edges]
        if unknown:
            raise UnknownName.among("scattered field of edges", unknown[0], self.world.edges,
                                    more="Give its first values with vertex_program(edges=...).")  # fmt: skip
        self.scattered.append((direction, {name: self._traced(direction, what) for name, what in fields.items()}))

    def random(self, *shape: int) -> np.ndarray:
        """Uniform random numbers in [0, 1). They depend on seed, round and vertex, not on workers or schedule."""
        count = int(np.prod(shape, dtype=np.int64))
        with np.errstate(over="ignore"):
            mixed = _mixed(np.uint64(self.world.seed) + np.uint64(self.world.round) * np.uint64(0x9E3779B97F4A7C15))
            mixed = _mixed(mixed ^ _mixed(self.numbers.astype(np.uint64)))
            drawn = _mixed(mixed[:, None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03))
        return np.asarray((drawn >> np.uint64(11)) * 2.0**-53).reshape(len(self.numbers), *shape)

    def _traced(self, direction: str, what: Callable[[Edge], Any]) -> Expression:
        if direction not in DIRECTIONS:
            raise UnknownName.among("direction", direction, DIRECTIONS, more="For both, use graph.undirected().")
        graph = self.graph
        made = what(Edge(self.world.fields(), {**graph.edge_fields, **self.world.edges}, direction,
                         lambda: graph.reverse))  # fmt: skip
        if isinstance(made, Expression):
            return made
        if np.ndim(made) != 0:
            raise ConfigError(
                "A gather must compute from the edge that it is given, such as e.source.value, but returned an array.",
                code="not-an-expression",
            )
        return Expression(lambda places: np.full(_count(places.neighbor, graph.size), made), frozenset([NEIGHBOR]))

    def _product(self, direction: str, expression: Expression) -> np.ndarray | None:
        """The sums of all own vertices as a product with a sparse matrix; None if that does not say it."""
        if expression.kinds != {NEIGHBOR}:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):  # also for vertices that no edge leads from
            values = np.asarray(expression.compute(EVERYWHERE))
        if values.ndim > 2 or values.dtype.kind != "f":
            return None
        return np.asarray(self.world.part.sums(direction) @ values)

    def _edge_by_edge(self, rows: Adjacency, expression: Expression, reduce: str) -> np.ndarray:
        own = self.value if reduce == "mode" else None
        lengths = rows.degrees[self.numbers]
        self.world.edge_updates += int(lengths.sum())
        made: list[np.ndarray] = []
        start, width = 0, 1
        while start < len(self.numbers) or not made:
            # The width of what is gathered is known after a first, small piece.
            room = (_MOST_VALUES if made else 1 << 14) // width
            filled = np.cumsum(lengths[start : start + room])
            stop = start + max(1, int(np.searchsorted(filled, room, side="right")))
            places, counts = rows.pick(self.numbers[start:stop])
            values = np.asarray(
                expression.compute(
                    Places(rows.others[places], np.repeat(self.numbers[start:stop], counts), rows.edges[places])
                )
            )
            if not len(values) == len(places):
                raise ConfigError(
                    f"A gather must give one row for each edge, but gave {values.shape} for {len(places)} edges.",
                    code="gather-shape", shape=values.shape,
                )  # fmt: skip
            width = max(1, int(np.prod(values.shape[1:], dtype=np.int64)))
            made.append(REDUCTIONS[reduce](values, counts, None if own is None else own[start:stop]))
            start = stop
        return np.concatenate(made)

    def computed_edges(self) -> list[tuple[str, np.ndarray, Any]]:
        """What was scattered: the field, the edges and their values."""
        graph, made = self.graph, []
        for direction, fields in self.scattered:
            rows = graph.into if direction == "in" else graph.out_of
            places, counts = rows.pick(self.numbers)
            where = Places(rows.others[places], np.repeat(self.numbers, counts), rows.edges[places])
            made += [(name, where.edge, expression.compute(where)) for name, expression in fields.items()]
        return made

    def set_edges(self, computed: list[tuple[str, np.ndarray, Any]]) -> int:
        """Write what was scattered; how many values were set."""
        for name, edges, values in computed:
            self.world.edges[name][edges] = values
        return sum(len(edges) for _, edges, _ in computed)


def _read_only(rows: Any) -> np.ndarray:
    """Rows that may be the state itself; a program changes it by what it returns only."""
    found = np.asarray(rows).view()
    found.flags.writeable = False
    return found


def _count(places: Any, size: int) -> int:
    return size if isinstance(places, slice) else len(places)


def _mixed(numbers: Any) -> Any:
    """SplitMix64's mixing of 64 bits (Steele, Lea and Flood, 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


__all__ = ["DIRECTIONS", "Gather", "Vertices", "World"]
