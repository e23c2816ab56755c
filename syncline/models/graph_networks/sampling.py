"""Drawing some of the neighbors of each node, layer by layer (W. Hamilton, R. Ying and J. Leskovec, Inductive
representation learning on large graphs, NIPS 2017).

What is drawn is a pure function of seed, step, layer and node: it does not depend on how many workers there are, or on
which of them a node is. Of a node with more neighbors than are wanted, every subset is equally likely, by R. Floyd's
algorithm, for many nodes at once. Here: the draw. Not here: what is computed with it (`network.py`).
"""

from __future__ import annotations

import numpy as np
import torch

from syncline.compute.dropout_operators import step_key
from syncline.graphs.adjacency import Adjacency
from syncline.graphs.graph import Graph
from syncline.models.graph_networks.neighborhood import Neighborhood

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_neighborhoods(
    graph: Graph, nodes: np.ndarray, count: int, layers: int
) -> tuple[list[Neighborhood], torch.Tensor]:
    """The neighborhoods of all layers, from the first, and the rows of `nodes` in the last one's output."""
    wanted, rows = np.unique(nodes, return_inverse=True)
    hoods: list[Neighborhood] = []
    targets = wanted
    for layer in reversed(range(layers)):
        places, sources = draw(graph.into, targets, count, step_key(layer))
        inside = np.full(graph.size, -1, np.int64)
        inside[targets] = np.arange(len(targets))
        others = np.unique(sources[inside[sources] < 0])
        inside[others] = len(targets) + np.arange(len(others))
        local = np.concatenate([targets, others])
        degrees = np.bincount(places, minlength=len(local))
        hoods.append(Neighborhood(local, len(targets), inside[sources], places, degrees))
        targets = local
    return hoods[::-1], torch.from_numpy(rows)


def draw(edges: Adjacency, nodes: np.ndarray, count: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """For each edge that is drawn, the place of its node among `nodes`, and the neighbor."""
    degrees = edges.degrees[nodes]
    few = np.flatnonzero(degrees <= count)
    all_places, lengths = edges.pick(nodes[few])
    many = np.flatnonzero(degrees > count)
    chosen = _subsets(nodes[many], degrees[many], count, key)
    drawn = edges.others[edges.offsets[nodes[many]][:, None] + chosen]
    places = np.concatenate([np.repeat(few, lengths), np.repeat(many, count)])
    return places, np.concatenate([edges.others[all_places], drawn.ravel()])


def _subsets(nodes: np.ndarray, sizes: np.ndarray, count: int, key: int) -> np.ndarray:
    """For each node, `count` different numbers below its size."""
    chosen = np.full((len(nodes), count), -1, np.int64)
    for number in range(count):
        last = sizes - count + number
        candidate = (_random(nodes, number, key) % (last + 1).astype(np.uint64)).astype(np.int64)
        is_taken = (chosen[:, :number] == candidate[:, None]).any(axis=1)
        chosen[:, number] = np.where(is_taken, last, candidate)
    return chosen


def _random(nodes: np.ndarray, number: int, key: int) -> np.ndarray:
    """64 random bits for each node (G. Steele, D. Lea and C. Flood, SplitMix, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        state = np.uint64(key) ^ (nodes.astype(np.uint64) * _GOLDEN)
        for turn in (np.uint64(number + 1), np.uint64(1)):
            state = state + turn * _GOLDEN
            state = (state ^ (state >> np.uint64(30))) * _MIX[0]
            state = (state ^ (state >> np.uint64(27))) * _MIX[1]
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)
