"""Loopy belief propagation on a pairwise Markov random field (J. Pearl, 1988; K. Murphy et al., 1999).

A vertex's belief is its own potential times the messages of its neighbors; its message to a neighbor is the belief
without what that neighbor has said, through the potential of the edge. On a tree the beliefs are the exact marginals.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from syncline.errors import ConfigError
from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def belief_propagation(
    graph: Graph, potentials: Any, coupling: Any, *, until: float = 1e-9, damping: float = 0.0,
    max_rounds: int = 1000, **settings: Any,
) -> GraphResult:  # fmt: skip
    """The belief of each vertex in each of its states: an array (vertices, states) whose rows sum to 1.

    `potentials` (vertices, states) and `coupling` (states, states; symmetric), both positive: the probability of an
    assignment is proportional to the product of all vertices' potentials and all edges' couplings. `damping` is the
    share of the old message that is kept, for graphs with short cycles.
    """
    own, pair = np.asarray(potentials, np.float64), np.asarray(coupling, np.float64)
    check_field(graph, own, pair)
    if not 0 <= damping < 1:
        raise ConfigError.for_setting("damping", damping, "from 0 to below 1")
    logs = np.log(own)

    simple = graph.undirected()
    states = own.shape[1]

    def update(v: Any) -> Any:
        total = logs[v.numbers] + v.gather("in", lambda e: e.message)
        v.scatter(
            "out",
            message=lambda e: _message(e.source.value[:, states:], e.reverse.message, e.message, pair, damping),
        )
        return np.concatenate([_normalized(total), total], axis=1)

    program = VertexProgram(
        name="belief-propagation", update=update, consistency="vertex", schedule="sweep", until=until,
        initial=np.zeros((graph.size, 2 * states)),  # the first round changes them, so it is not taken for the last
        edges={"message": np.zeros((simple.edge_count, states))},
    )  # fmt: skip
    found = run(program, simple, max_rounds=max_rounds, **settings)
    return dataclasses.replace(found, graph=graph, values=found.values[:, :states])


def check_field(graph: Graph, own: np.ndarray, pair: np.ndarray) -> None:
    """Whether potentials and coupling fit the graph and each other."""
    if own.ndim != 2 or len(own) != graph.size:
        raise ConfigError(
            f"potentials has the shape {own.shape}, but must be (vertices, states) with {graph.size:,} rows.",
            code="field-length", shape=own.shape,
        )  # fmt: skip
    states = own.shape[1]
    if pair.shape != (states, states) or not np.allclose(pair, pair.T):
        raise ConfigError(
            f"coupling must be a symmetric matrix of {states} x {states}, as potentials has {states} states.",
            code="coupling-shape", shape=pair.shape,
        )  # fmt: skip
    if not ((own > 0).all() and (pair > 0).all()):
        raise ConfigError("potentials and coupling must be positive.", code="not-positive")


def _normalized(logs: np.ndarray) -> np.ndarray:
    raised = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def _message(sums: Any, back: Any, old: Any, pair: np.ndarray, damping: float) -> Any:
    """The logarithm of the message along each edge, from the sums of the logarithms at its source."""
    known = sums - back
    known = known - np.max(known, axis=1, keepdims=True)
    sent = np.log(np.matmul(np.exp(known), pair))
    sent = sent - np.max(sent, axis=1, keepdims=True)
    return damping * old + (1 - damping) * sent
