"""Gradients, every step, with everyone: synchronous data parallelism, exact or encoded.

With worker k's mean gradient g_k over n_k of the step's N samples, every worker applies  g = sum_k (n_k / N) g_k,
which is the mean gradient over all N samples whatever the n_k are. With a lossy encoding C and worker k's residual e_k
(Karimireddy et al. 2019):

    p_k = C((n_k / N) g_k + e_k)        e_k <- (n_k / N) g_k + e_k - p_k        g = sum_k p_k

Exact is the same point in the space of strategies as ChainerMN (Akiba et al. 2017), CaffeOnSpark, Horovod (Sergeev &
Del Balso 2018) and PyTorch DDP (Li et al. 2020); OneBit is CNTK's (Seide et al. 2014).
"""

from __future__ import annotations

from typing import Any

from syncline.strategies.combine import Combiner
from syncline.strategies.exchange import Replica, adopt_first
from syncline.strategies.how import Exact, How

__all__ = ["SumGradients"]


class SumGradients:
    """An `Exchange`: the weighted sum of all gradients before every update."""

    def __init__(self, replica: Replica, how: How) -> None:
        self._replica = replica
        self._is_exact = isinstance(how, Exact)
        self._combiners = [Combiner(how, replica.collective) for _ in replica.gradients.flats]

    def begin(self) -> None:
        """Everybody takes rank 0's parameters and buffers, so that different starting points cannot go unnoticed."""
        adopt_first(self._replica)

    def before_forward(self) -> None:
        """Nothing: the parameters are already those of everyone."""

    def before_update(self, weight: float) -> bool:
        """Sum the gradients. The riders are part of the buffer, but an encoding must not touch them."""
        gradients = self._replica.gradients
        if self._is_exact:
            for flat in gradients.flats:
                self._replica.collective.sum_(flat, weight)
            return True
        for flat, combiner in zip(gradients.flats, self._combiners, strict=True):
            count = flat.numel() - (gradients.riders.numel() if flat is gradients.flats[0] else 0)
            if count:
                combiner.sum_(flat[:count], weight)
        self._replica.collective.sum_(gradients.riders, weight)
        return True

    def after_update(self, weight: float) -> bool:
        """Nothing: equal gradients on equal parameters gave equal parameters."""
        del weight
        return False

    def settle(self) -> None:
        """Nothing: the replicas are equal after every step."""

    def private_state(self) -> dict[str, Any] | None:
        """What this worker could not send yet."""
        return None if self._is_exact else {"combiners": [c.state() for c in self._combiners]}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        for combiner, saved in zip(self._combiners, state["combiners"], strict=True):
            combiner.load(saved)
