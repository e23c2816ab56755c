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

from syncline.errors import PeerLost
from syncline.strategies.combine import make_combiner
from syncline.strategies.during_backward import sums_during_backward
from syncline.strategies.exchange import PlainExchange, Recovery, Replica
from syncline.strategies.how import Exact, How

__all__ = ["SumGradients"]


class SumGradients(PlainExchange):
    """An `Exchange`: the weighted sum of all gradients before every update.

    Equal gradients on equal parameters give equal parameters, so nothing else is ever exchanged.
    """

    recovery: Recovery = "equal"

    def __init__(self, replica: Replica, how: How) -> None:
        super().__init__(replica)
        self._is_exact = isinstance(how, Exact)
        self._combiners = [
            make_combiner(how, replica.collective, [p.shape for p in members], replica.seed)
            for members in replica.gradients.members
        ]
        self._ahead = sums_during_backward(replica) if self._is_exact else {}

    def before_backward(self, weight: float) -> None:
        """From here on, gradients are summed as backward completes them."""
        for summing in self._ahead.values():
            summing.begin(weight)

    def before_update(self, weight: float) -> bool:
        """Sum the gradients. The riders are part of the buffer, but an encoding must not touch them."""
        gradients, collective = self.replica.gradients, self.replica.collective
        if self._is_exact:
            for number, flat in enumerate(gradients.flats):
                if number in self._ahead:
                    self._ahead[number].finish(weight)
                else:
                    collective.sum_(flat, weight)
        else:
            self._sum_encoded(weight)
        self.replica.log.exchanged()
        return True

    def _sum_encoded(self, weight: float) -> None:
        gradients = self.replica.gradients
        before = [combiner.state() for combiner in self._combiners]
        try:
            for flat, combiner in zip(gradients.flats, self._combiners, strict=True):
                count = flat.numel() - (gradients.riders.numel() if flat is gradients.flats[0] else 0)
                if count:
                    combiner.sum_(flat[:count], weight)
            self.replica.collective.sum_(gradients.riders, weight)
        except PeerLost:
            for combiner, state in zip(self._combiners, before, strict=True):
                combiner.load(state)  # the step will be done again, so what it left over counts as not left
            raise

    def close(self) -> None:
        """Backward passes are nobody's business any more."""
        for summing in self._ahead.values():
            summing.close()

    def private_state(self) -> dict[str, Any] | None:
        """What this worker could not send yet."""
        return None if self._is_exact else {"combiners": [c.state() for c in self._combiners]}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again. A worker that is alone may have another strategy's, as long as it is."""
        for combiner, saved in zip(self._combiners, state.get("combiners", ()), strict=False):
            combiner.load(saved)

    def newcomers_state(self) -> dict[str, Any] | None:
        """As this worker's, but nothing left over: what a lost worker could not send yet is lost with it."""
        return None if self._is_exact else {"combiners": [{**c.state(), "residual": None} for c in self._combiners]}
