"""Alternating least squares: a factor vector for each vertex whose products give the ratings on edges.

(Y. Zhou et al., 2008, with the regularization times the number of ratings.) Users and items are the two sides of the
graph, so edge consistency updates one side at a time, each vertex by the solution of its own small system.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from syncline.errors import ConfigError, UnknownName
from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def als(
    graph: Graph, *, rating: str = "rating", factors: int = 8, regularization: float = 0.1, rounds: int = 20,
    until: float = 1e-6, seed: int = 0, **settings: Any,
) -> GraphResult:  # fmt: skip
    """The factors of each vertex, an array (vertices, factors); edges go from users to items and have a `rating`.

    A rating is predicted by the product of two rows. Ends after `rounds`, or when factors change by less than `until`.
    """
    if rating not in graph.edge_fields:
        raise UnknownName.among("edge field", rating, graph.edge_fields)
    if factors < 1 or not regularization > 0:
        raise ConfigError.for_setting("factors", factors, "1 or more, with a regularization above 0")
    is_user = graph.out_degree > 0
    if (is_user & (graph.in_degree > 0)).any():
        both = graph.name(int(np.argmax(is_user & (graph.in_degree > 0))))
        raise ConfigError(
            f"The vertex {both} has edges in both directions, but ALS needs users, whose edges go out, and items, "
            "whose edges come in.", code="not-bipartite", vertex=both,
        )  # fmt: skip
    ratings = np.asarray(graph.edge_fields[rating], np.float64)
    eye = np.eye(factors)

    def solved(matrices: np.ndarray, sides: np.ndarray, counts: np.ndarray) -> np.ndarray:
        weights = regularization * np.maximum(counts, 1)
        return np.linalg.solve(matrices + weights[:, None, None] * eye, sides[:, :, None])[:, :, 0]

    def update(v: Any) -> Any:
        outer = v.gather("in", lambda e: e.source.value[:, :, None] * e.source.value[:, None, :])
        sides = v.gather("in", lambda e: e.source.value * e.given[:, None])
        return solved(outer, sides, v.in_degree)

    both_ways = Graph(
        (graph.sources, graph.targets), edge_fields={"given": ratings}, names=graph.names, size=graph.size,
        directed=False,
    )  # fmt: skip
    first = np.random.default_rng(seed).normal(0, 1 / np.sqrt(factors), (graph.size, factors))
    program = VertexProgram(
        name="als", update=update, consistency="edge", schedule="chromatic", initial=first, until=until
    )
    # Users first: their colors do not matter, as long as they are not those of items.
    colors = np.where(is_user, 0, 1)
    found = run(program, both_ways, max_rounds=rounds, colors=colors, seed=seed, **settings)
    return dataclasses.replace(found, graph=graph)
