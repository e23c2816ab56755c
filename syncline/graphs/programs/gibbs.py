"""Gibbs sampling of a pairwise Markov random field, color by color (J. Gonzalez et al., AISTATS 2011).

Neighbors are never drawn at once (edge consistency), so each round is a sweep of the sequential sampler. The draws
depend on seed, round and vertex only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from syncline.errors import ConfigError
from syncline.graphs.graph import Graph
from syncline.graphs.program import VertexProgram
from syncline.graphs.programs.belief_propagation import check_field
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run


def gibbs(
    graph: Graph, potentials: Any, coupling: Any, *, samples: int = 1000, burn_in: int = 100, **settings: Any
) -> GraphResult:
    """How often each vertex was in each of its states: an array (vertices, states) whose rows sum to 1.

    `potentials` and `coupling` are those of `belief_propagation`. The first `burn_in` rounds are not counted.
    """
    own, pair = np.asarray(potentials, np.float64), np.asarray(coupling, np.float64)
    check_field(graph, own, pair)
    if samples < 1 or burn_in < 0:
        raise ConfigError.for_setting("samples", samples, "1 or more, and burn_in 0 or more")
    states = own.shape[1]
    logs, log_pair = np.log(own), np.log(pair)

    def update(v: Any) -> Any:
        # The state is kept as a row with a one, so that the sum over neighbors counts each state.
        weights = logs[v.numbers] + v.gather("in", lambda e: e.source.value[:, :states]) @ log_pair
        raised = np.exp(weights - weights.max(axis=1, keepdims=True))
        limits = np.cumsum(raised, axis=1)
        drawn = (v.random(1) * limits[:, -1:] > limits).sum(axis=1)
        state = np.eye(states)[drawn]
        return np.concatenate([state, v.value[:, states:] + (state if v.round >= burn_in else 0.0)], axis=1)

    first = np.concatenate([np.eye(states)[own.argmax(axis=1)], np.zeros_like(own)], axis=1)
    program = VertexProgram(
        name="gibbs", update=update, consistency="edge", schedule="chromatic", initial=first, is_sampling=True
    )
    found = run(program, graph.undirected(), max_rounds=burn_in + samples, **settings)
    return dataclasses.replace(found, graph=graph, values=found.values[:, states:] / samples)
