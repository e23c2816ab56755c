"""Beliefs over time: how the states of nodes follow each other, given the parent's advice.

Here: pure functions of tables of counts. A node's state s is its most likely cluster, and its parent's state a is the
advice. The table of 2009 holds P(s'|s, a); with what the observation says, the belief becomes (Arel et al., 2009)

    b'(s') proportional to P(o|s') sum_s P(s'|s, a) b(s)

Not here: P(o|s') (`cells.py`). The table is kept as counts n(a, s, s'), which add up over samples and workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNSEEN = 1.0
"""Spread over all s': a transition that was never seen is improbable, not impossible."""


def new_table(rows: int, advices: int, clusters: int) -> Tensor:
    """Counts [rows, advice and cluster before, cluster after]."""
    return torch.zeros(rows, advices * clusters, clusters, dtype=torch.float64)


def counted(table: Tensor, advice: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """How often each transition occurs; the states and advices are [rows, observations]."""
    rows, pairs, clusters = table.shape
    row = torch.arange(rows, device=before.device).unsqueeze(1)
    places = (row * pairs + advice * clusters + before) * clusters + after
    counts = torch.bincount(places.flatten(), minlength=table.numel())
    return counts.to(table.dtype).view_as(table)


def learn(table: Tensor, counts: Tensor) -> None:
    """Add the counts of a mini-batch, which a weighted sum over workers has rounded."""
    table.add_(counts.round())


def expected(table: Tensor, advice: Tensor, before: Tensor) -> Tensor:
    """sum_s P(s'|s, a) b(s): [rows, observations, clusters] from the beliefs `before`."""
    rows, pairs, clusters = table.shape
    chances = table + _UNSEEN / clusters
    chances = chances / chances.sum(-1, keepdim=True)
    spread = before.new_zeros(rows, before.shape[1], pairs // clusters, clusters)
    index = advice.view(rows, -1, 1, 1).expand(-1, -1, 1, clusters)
    spread.scatter_(2, index, before.unsqueeze(2))  # b(s) where the advice is a, else 0
    return torch.bmm(spread.flatten(2), chances)
