"""Finding a cycle where none may be. Here: a pure function of the graph, and the error that names what it found."""

from __future__ import annotations

import numpy as np

from syncline.errors import DataError
from syncline.graphs.graph import Graph

_MOST_NAMES = 6


def find_cycle(graph: Graph) -> list[int] | None:
    """The vertices of a cycle in the order of its edges; None if there is none.

    Vertices without edges from others are removed, again and again (A. Kahn, 1962). What is left has a cycle behind
    each vertex.
    """
    waits_for = graph.in_degree.copy()
    is_left = np.ones(graph.size, bool)
    free = np.flatnonzero(waits_for == 0)
    while len(free):
        is_left[free] = False
        places, _ = graph.out_of.pick(free)
        reached, counts = np.unique(graph.out_of.others[places], return_counts=True)
        waits_for[reached] -= counts
        free = reached[waits_for[reached] == 0]
    if not is_left.any():
        return None
    behind = graph.into.only(is_left)
    at = int(np.argmax(is_left))
    path: list[int] = []
    seen: dict[int, int] = {}
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = int(behind.others[behind.offsets[at]])
    return path[seen[at] :][::-1]


def check_acyclic(graph: Graph, *, of: str) -> None:
    """`DataError` that names a cycle, if there is one."""
    cycle = find_cycle(graph)
    if cycle is None:
        return
    names = [graph.name(number) for number in cycle]
    shown = names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], "..."]
    raise DataError(
        f"{of} need a graph without cycles, but {' -> '.join([*shown, names[0]])} is one ({len(names):,} edges). "
        "Remove one of its edges.", code="cycle", cycle=names,
    )  # fmt: skip
