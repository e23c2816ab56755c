"""Peer choice and mixing weights for gossip.

Here: pure functions of members, step and seed. Not here: sending (`comms`), or when to gossip (`strategies`).

One round of gossip replaces the values x_i of every rank i at the same time by

    x_i <- sum_j W_ij x_j

A `Mixing` holds W by rank: `mixing[i]` are the ranks j that i takes from, itself included, with their weights. All
topologies here are doubly stochastic (rows and columns of W sum to one): rows, so that agreement is kept; columns, so
that the mean of all ranks is kept. How fast ranks come to agree is the spectral gap: with  rho = |W - 11^T/n|_2,

    |x(t) - mean| <= rho^t |x(0) - mean|,       spectral_gap(W) = 1 - rho

`members` are the present ranks, in any order and with any gaps; a topology is laid over them in ascending order. When
some ranks fail, calling the same function with the others chooses new peers, the same on every rank, without any
communication: all ranks know the same members, step and seed.

    name                  peers   symmetric   spectral gap   after
    ring                  2       yes         O(1/n^2)
    torus                 4       yes         O(1/n)
    static-exponential    log n   no          O(1/log n)     Ying et al. 2021; Assran et al. 2019
    exponential           1       no          by cycle       Ying et al. 2021, "one-peer"
    random                1       yes         in the mean    Boyd et al. 2006
    pair (see there)      1       yes         in the mean    AD-PSGD, Lian et al. 2018
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Mixing = dict[int, dict[int, float]]
"""For each rank the ranks that it takes from, itself included, with their weights."""


class Topology(Protocol):
    """Which ranks mix in one step."""

    def __call__(self, members: Sequence[int], step: int = 0, seed: int = 0) -> Mixing:
        """The mixing of these members."""


def ring(members: Sequence[int], step: int = 0, seed: int = 0) -> Mixing:
    """Each rank with the one before and the one after it, all weights equal."""
    del step, seed
    ranks = _ascending(members)
    return _evenly(ranks, [{(i - 1) % len(ranks), (i + 1) % len(ranks)} for i in range(len(ranks))])


def torus(members: Sequence[int], step: int = 0, seed: int = 0) -> Mixing:
    """Each rank with its four neighbors on a wrapped grid, as square as the number of members allows.

    A prime number of members allows only one row, which is a ring.
    """
    del step, seed
    ranks = _ascending(members)
    rows = max(d for d in range(1, len(ranks) + 1) if d * d <= len(ranks) and len(ranks) % d == 0)
    cols = len(ranks) // rows

    def around(i: int) -> set[int]:
        row, col = divmod(i, cols)
        return {
            (row - 1) % rows * cols + col,
            (row + 1) % rows * cols + col,
            row * cols + (col - 1) % cols,
            row * cols + (col + 1) % cols,
        }

    return _evenly(ranks, [around(i) for i in range(len(ranks))])


def static_exponential(members: Sequence[int], step: int = 0, seed: int = 0) -> Mixing:
    """Each rank takes from those 1, 2, 4, 8, ... places after it, all weights equal. Not symmetric."""
    del step, seed
    ranks = _ascending(members)
    size = len(ranks)
    return _evenly(ranks, [{(i + 2**j) % size for j in range(_doublings(size))} for i in range(size)])


def exponential(members: Sequence[int], step: int = 0, seed: int = 0) -> Mixing:
    """Each rank takes one half from the one 2^j places after it, where j cycles with the steps. Not symmetric.

    For n = 2^k members, k steps in a row give the exact mean (Ying et al. 2021): as good as an all-reduce, spread over
    k steps with one message each.
    """
    del seed
    ranks = _ascending(members)
    size = len(ranks)
    if size == 1:
        return {ranks[0]: {ranks[0]: 1.0}}
    distance = 2 ** (step % _doublings(size))
    return {rank: {rank: 0.5, ranks[(i + distance) % size]: 0.5} for i, rank in enumerate(ranks)}


def random_pairs(members: Sequence[int], step: int = 0, seed: int = 0) -> Mixing:
    """Random pairs, new in each step, average with each other; an odd one out keeps its own value."""
    mixing: Mixing = {rank: {rank: 1.0} for rank in _ascending(members)}
    for first, second in matching(members, step, seed)[0]:
        mixing[first] = {first: 0.5, second: 0.5}
        mixing[second] = {first: 0.5, second: 0.5}
    return mixing


TOPOLOGIES: Mapping[str, Topology] = {
    "exponential": exponential,
    "random": random_pairs,
    "ring": ring,
    "static-exponential": static_exponential,
    "torus": torus,
}


def matching(members: Sequence[int], step: int, seed: int) -> tuple[list[tuple[int, int]], int | None]:
    """Disjoint pairs of all members, drawn at random, and the one left over if they are odd in number."""
    ranks = _ascending(members)
    order = [ranks[i] for i in _stream(seed, step).permutation(len(ranks))]
    pairs = [(min(two), max(two)) for two in zip(order[0::2], order[1::2], strict=False)]
    return sorted(pairs), order[-1] if len(order) % 2 else None


def pair(members: Sequence[int], first: int, second: int) -> Mixing:
    """Two ranks average, all others keep their own: one event of AD-PSGD (Lian et al. 2018).

    There are no common steps in AD-PSGD; each such event happens on its own, and a run is the product of their W.
    """
    ranks = _ascending(members)
    if first == second or not {first, second} <= set(ranks):
        raise ValueError(f"{first} and {second} are not two of the members {ranks}.")
    mixing: Mixing = {rank: {rank: 1.0} for rank in ranks}
    mixing[first] = {first: 0.5, second: 0.5}
    mixing[second] = {first: 0.5, second: 0.5}
    return mixing


def bipartite(members: Sequence[int]) -> tuple[list[int], list[int]]:
    """AD-PSGD's active ranks, which start an averaging, and passive ones, which respond.

    With both roles in one rank, three ranks that each wait for the next would wait for ever; so every second is active.
    """
    ranks = _ascending(members)
    return ranks[0::2], ranks[1::2]


def choose_passive(rank: int, members: Sequence[int], step: int, seed: int) -> int | None:
    """The random passive rank that the active `rank` averages with in its step `step`; None if there is none."""
    active, passive = bipartite(members)
    if rank not in active:
        raise ValueError(f"Rank {rank} is not one of the active ranks {active}, so it cannot start an averaging.")
    return passive[_stream(seed, step, rank).randint(len(passive))] if passive else None


def receivers(mixing: Mixing, rank: int) -> list[int]:
    """The other ranks that take from `rank`. In a topology that is not symmetric they are not its peers."""
    return [other for other, weights in mixing.items() if rank in weights and other != rank]


def mix(values: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    """One rank's new value: the sum of `values`, by rank, with its `weights`. The same order, and bits, everywhere."""
    order = sorted(weights)
    total = values[order[0]] * weights[order[0]]
    for rank in order[1:]:
        total.add_(values[rank], alpha=weights[rank])
    return total


def mixing_matrix(mixing: Mixing) -> Tensor:
    """W in float64, with rows and columns in ascending order of rank."""
    place = {rank: i for i, rank in enumerate(sorted(mixing))}
    matrix = torch.zeros(len(place), len(place), dtype=torch.float64)
    for rank, weights in mixing.items():
        for other, weight in weights.items():
            matrix[place[rank], place[other]] = weight
    return matrix


def spectral_gap(matrix: Tensor) -> float:
    """1 - |W - 11^T/n|_2: how much of their disagreement the ranks lose in one step, at least.

    For symmetric W, and for all topologies here, that is one less the second largest |eigenvalue|. The norm also bounds
    what a W with other eigenvectors does in a single step, where eigenvalues speak only of the long run.
    """
    size = len(matrix)
    return 1.0 - float(torch.linalg.matrix_norm(matrix - 1.0 / size, ord=2))


def _ascending(members: Sequence[int]) -> list[int]:
    ranks = sorted(set(members))
    if not ranks or len(ranks) < len(members):
        raise ValueError(f"Gossip needs at least one member, each listed once, but got {list(members)}.")
    return ranks


def _evenly(ranks: Sequence[int], peers: Sequence[set[int]]) -> Mixing:
    """Equal weights for everyone and its peers, given by place; doubly stochastic as all have equally many."""
    mixing: Mixing = {}
    for i, around in enumerate(peers):
        places = sorted({i, *around})
        mixing[ranks[i]] = {ranks[j]: 1.0 / len(places) for j in places}
    return mixing


def _doublings(size: int) -> int:
    """How often 1 must be doubled to reach `size`."""
    return (size - 1).bit_length()


def _stream(*place: int) -> np.random.RandomState:
    """A generator for one point of a run; NumPy guarantees that its stream never changes."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(place)))
