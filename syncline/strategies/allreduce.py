"""Gradients, every step, with everyone, exact: synchronous data parallelism.

With worker k's mean gradient g_k over n_k of the step's N samples, every worker applies  g = sum_k (n_k / N) g_k,
which is the mean gradient over all N samples whatever the n_k are. The same point in the space of strategies as
ChainerMN (Akiba et al. 2017), CaffeOnSpark, Horovod (Sergeev & Del Balso 2018) and PyTorch DDP (Li et al. 2020).
"""

from __future__ import annotations

from typing import Any

from syncline.strategies.exchange import Replica

__all__ = ["AllReduce"]


class AllReduce:
    """An `Exchange`: the weighted sum of all gradients before every update."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def begin(self) -> None:
        """Everybody takes rank 0's parameters and buffers, so that different starting points cannot go unnoticed."""
        model = self._replica.model
        for tensor in [*model.parameters(), *model.buffers()]:
            self._replica.collective.broadcast_(tensor.detach())

    def before_forward(self) -> None:
        """Nothing: the parameters are already those of everyone."""

    def before_update(self, weight: float) -> bool:
        """Sum."""
        for flat in self._replica.gradients.flats:
            self._replica.collective.sum_(flat, weight)
        return True

    def after_update(self, weight: float) -> bool:
        """Nothing: equal gradients on equal parameters gave equal parameters."""
        del weight
        return False

    def settle(self) -> None:
        """Nothing: the replicas are equal after every step."""

    def private_state(self) -> None:
        """Nothing: the replicas are equal."""

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""
        del state
