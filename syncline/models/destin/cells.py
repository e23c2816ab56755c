"""The clusters of a layer's nodes: who wins an observation, what is learned from it, and what a node believes.

Here: pure functions of observations and cells, vectorized over all nodes of a layer. Not here: how observations are
made from an image and from the beliefs below (`network.py`), and beliefs over time (`transitions.py`).

A node has K clusters, each with a mean m, a variance v, a number of wins n and a starvation s (Arel, Rose & Coop,
"DeSTIN: A Scalable Deep Learning Architecture with Application to High-Dimensional Robust Pattern Recognition", AAAI
Fall Symposium, 2009). Of an observation o the cluster with the least s |o - m|^2 wins. What the C observations of a
mini-batch that a cluster wins do to it depends on them only through C, sum(o) and sum(o^2), which add up over samples,
so over workers too:

    n <- n + C        m <- m + C / min(n, memory) (sum(o) / C - m)
    v <- v + max(1 - (1 - b)^C, C / n) (mean of (o - m)^2 - v)
    s <- 1 if C > 0, else (1 - c) s

With one observation per mini-batch these are the published rules. All is computed in float64, so that the order in
which workers add up changes the 16th digit only. That must not give an observation another winner. In data of few
levels, such as bytes, two clusters are often equally near; so distances that agree in the first ten digits count as
equal, and the first cluster wins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_VARIANCE = 0.02
_NEAREST = 1e-6
_DIGITS = 34
"""Binary ones: ten decimal digits."""


class Rates(NamedTuple):
    """How fast clusters change."""

    memory: float = 3000.0
    """A mean is that of about so many observations, so that old ones are forgotten."""
    variance: float = 0.001
    """b"""
    starvation: float = 0.02
    """c"""


USUAL = Rates()


class Cells(NamedTuple):
    """The parts of a tensor [rows, clusters, 2 D + 2] for observations of D numbers, or of the sums that change it.

    There is a row for each node, or one for all nodes that share their clusters.
    """

    mean: Tensor
    """Or the sum of the observations."""
    variance: Tensor
    """Or the sum of their squares."""
    wins: Tensor
    """[rows, clusters, 1]; or the number of observations."""
    starvation: Tensor
    """[rows, clusters, 1]; or nothing."""


def parts_of(cells: Tensor) -> Cells:
    """Views of the four parts."""
    size = (cells.shape[-1] - 2) // 2
    return Cells(*torch.split(cells, [size, size, 1, 1], dim=-1))


def new_cells(rows: int, clusters: int, size: int, *, center: float, spread: float) -> Tensor:
    """Means closely around `center`: the first observations then fall into cones around it, some in nearly each."""
    cells = torch.zeros(rows, clusters, 2 * size + 2, dtype=torch.float64)
    own = parts_of(cells)
    own.mean.copy_(center + spread * torch.randn(rows, clusters, size, dtype=torch.float64))
    own.variance.fill_(1.0)
    own.starvation.fill_(1.0)
    return cells


def squared_distances(observed: Tensor, means: Tensor) -> Tensor:
    """[rows, observations, clusters] from [rows, observations, D] and [rows, clusters, D]."""
    squares = observed.square().sum(-1, keepdim=True) + means.square().sum(-1).unsqueeze(1)
    return torch.baddbmm(squares, observed, means.transpose(1, 2), alpha=-2).clamp_(min=0)


def winners(observed: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """The winner of each observation, and the squared distance to it."""
    own = parts_of(cells)
    distances = squared_distances(observed, own.mean)
    chosen = (distances * own.starvation.transpose(1, 2)).div_(_resolution(observed, own.mean)).round_().argmin(-1)
    return chosen, distances.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def _resolution(observed: Tensor, means: Tensor) -> Tensor:
    """The differences of squared distances that count, [rows, observations, 1]: powers of 2, so that all agree."""
    size = observed.square().sum(-1, keepdim=True) + means.square().sum(-1).mean(-1).view(-1, 1, 1)
    digits = _DIGITS if observed.dtype == torch.float64 else _DIGITS // 2
    return torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - digits)


def states_of(beliefs: Tensor) -> Tensor:
    """The most likely cluster, the first of those that are equally likely to ten digits."""
    return (beliefs * 2.0**_DIGITS).round_().argmax(-1)


def sums_of(observed: Tensor, chosen: Tensor, clusters: int) -> Tensor:
    """What the observations change their winners by, in the form of `Cells`: these add up."""
    won = torch.nn.functional.one_hot(chosen, clusters).to(observed.dtype).transpose(1, 2)
    count = won.sum(-1, keepdim=True)
    return torch.cat([won @ observed, won @ observed.square(), count, torch.zeros_like(count)], dim=-1)


def learn(cells: Tensor, sums: Tensor, rates: Rates) -> None:
    """Apply the sums of a mini-batch, in place; a layer without any observation stays as it is."""
    own, seen = parts_of(cells), parts_of(sums)
    count = seen.wins.round()  # the exact integer: the sum over workers is weighted, which rounds
    if not count.any():
        return
    has_won, at_least_one = count > 0, count.clamp(min=1)
    own.wins.add_(count)
    average = seen.mean / at_least_one
    squared = seen.variance / at_least_one - 2 * average * own.mean + own.mean.square()
    rate = torch.maximum(1 - (1 - rates.variance) ** count, count / own.wins.clamp(min=1))
    own.variance.add_(has_won * rate * (squared.clamp_(min=0) - own.variance))
    rate = count / torch.minimum(own.wins, count.clamp(min=rates.memory)).clamp(min=1)
    own.mean.add_(has_won * rate * (average - own.mean))
    own.starvation.copy_(torch.where(has_won, 1.0, own.starvation * (1 - rates.starvation)))


def likelihoods(observed: Tensor, cells: Tensor, sharpness: float) -> Tensor:
    """How well each cluster explains each observation: 1 / (its distance in standard deviations)^sharpness."""
    own = parts_of(cells)
    precision = 1 / (own.variance + _LEAST_VARIANCE)
    scaled = own.mean * precision
    distances = torch.bmm(observed.square(), precision.transpose(1, 2))
    distances = torch.baddbmm(distances, observed, scaled.transpose(1, 2), alpha=-2)
    distances += (own.mean * scaled).sum(-1).unsqueeze(1)
    return distances.clamp_(min=_NEAREST).pow_(-sharpness / 2)


def normalized(weights: Tensor) -> Tensor:
    """Beliefs: they add up to 1."""
    return weights / weights.sum(-1, keepdim=True)
