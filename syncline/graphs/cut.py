"""What the parts of a divided graph have to send each other, and nothing more.

Here: pure functions of the graph, of the part of each vertex, and of what a program reads (`Reads`). Not here: dividing
a graph (`partition.py`), and sending (`workers/part_team.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from syncline.graphs.expressions import NEIGHBOR
from syncline.graphs.graph import Graph
from syncline.graphs.part import Part
from syncline.graphs.program import VertexProgram
from syncline.graphs.vertices import Vertices, World

Routes = dict[tuple[int, int], np.ndarray]
"""For each pair of parts (from, to) what the one sends to the other, in ascending order."""


@dataclass(frozen=True)
class Reads:
    """What a program reads beyond its own vertices: in which directions values, and which edges it scatters."""

    neighbors: frozenset[str] = frozenset()
    """The directions in which values of neighbors are read."""
    signals: frozenset[str] = frozenset()
    """The directions in which neighbors learn that a vertex has changed."""
    scatters: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: VertexProgram, graph: Graph, state: dict[str, np.ndarray], seed: int) -> Reads:
        """Call the program for one vertex without using what it returns."""
        edges = {name[5:]: array for name, array in state.items() if name.startswith("edge.")}
        aggregates: dict[str, Any] = {name: f(state["value"]) for name, f in program.aggregates.items()}
        world = World(Part(graph), {"value": state["value"]}, edges, seed, aggregates=aggregates)
        vertices = Vertices(world, np.arange(min(1, graph.size)), are_all=False)
        program(vertices)
        follows = program.schedule in ("fifo", "priority")
        gathers = {gather.direction for gather in world.gathers}
        read = {gather.direction for gather in world.gathers if NEIGHBOR in gather.expression.kinds}
        for direction, fields in vertices.scattered:
            if any(NEIGHBOR in expression.kinds for expression in fields.values()):
                read.add(direction)
        return cls(frozenset(read), frozenset(gathers if follows else ()), frozenset(d for d, _ in vertices.scattered))

    @property
    def directions(self) -> frozenset[str]:
        """In which directions vertices are known in other parts."""
        return self.neighbors | self.signals


def vertex_routes(graph: Graph, owners: np.ndarray, directions: frozenset[str]) -> Routes:
    """The vertices of each part that another part reads, each once."""
    parts, keys = _parts(owners), []
    for direction in directions:
        reader, read = _ends(graph, direction)
        is_cut = owners[reader] != owners[read]
        pair = owners[read[is_cut]] * parts + owners[reader[is_cut]]
        keys.append(pair * np.int64(graph.size) + read[is_cut])
    return _by_pair(keys, parts, graph.size)


def edge_routes(graph: Graph, owners: np.ndarray, directions: frozenset[str]) -> Routes:
    """The edges whose fields one part sets and another, where their other end is, reads."""
    parts, keys = _parts(owners), []
    for direction in directions:
        other, writer = _ends(graph, "in" if direction == "out" else "out")
        edges = np.flatnonzero(owners[writer] != owners[other])
        pair = owners[writer[edges]] * parts + owners[other[edges]]
        keys.append(pair * np.int64(graph.edge_count) + edges)
    return _by_pair(keys, parts, graph.edge_count)


def distance_two(graph: Graph, owners: np.ndarray, own: int) -> np.ndarray:
    """Which vertices of part `own` are neighbors of another part, or have a neighbor that is (True by vertex)."""
    is_near = owners != own
    for _ in range(2):
        reached = is_near.copy()
        reached[graph.targets[is_near[graph.sources]]] = True
        reached[graph.sources[is_near[graph.targets]]] = True
        is_near = reached
    return np.asarray(is_near & (owners == own))


def _ends(graph: Graph, direction: str) -> tuple[np.ndarray, np.ndarray]:
    """The ends of each edge: that which gathers in this direction, and that which it reads."""
    return (graph.targets, graph.sources) if direction == "in" else (graph.sources, graph.targets)


def _parts(owners: np.ndarray) -> np.int64:
    return np.int64(int(owners.max(initial=0)) + 1)


def _by_pair(keys: list[np.ndarray], parts: np.int64, size: int) -> Routes:
    pairs, numbers = np.divmod(np.unique(np.concatenate(keys)) if keys else np.empty(0, np.int64), max(size, 1))
    bounds = np.flatnonzero(np.diff(pairs, prepend=-1))
    found = np.split(numbers, bounds[1:]) if len(pairs) else []
    return {(int(pair // parts), int(pair % parts)): group for pair, group in zip(pairs[bounds], found, strict=True)}
