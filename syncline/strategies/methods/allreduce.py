"""Gradients, every step, with everyone: synchronous data parallelism, exact or encoded.

With worker k's mean gradient g_k over n_k of the step's N samples, every worker applies  g = sum_k (n_k / N) g_k,
which is the mean gradient over all N samples whatever the n_k are. With a lossy encoding C and worker k's residual e_k
(Karimireddy et al. 2019):

    p_k = C((n_k / N) g_k + e_k)        e_k <- (n_k / N) g_k + e_k - p_k        g = sum_k p_k

Exact is the same point in the space of strategies as ChainerMN (Akiba et al. 2017), CaffeOnSpark, Horovod (Sergeev &
Del Balso 2018) and PyTorch DDP (Li et al. 2020); OneBit is CNTK's (Seide et al. 2014).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from syncline.errors import PeerFailed
from syncline.strategies.exchange import LocalExchange, Replica
from syncline.strategies.how import BF16, Exact, Int8, OneBit, PowerSGD, TopK
from syncline.strategies.lazy import overlap
from syncline.strategies.method import AnswersMethod, Misfit, ModelShapes, Recovery
from syncline.strategies.traffic import Pattern, Traffic
from syncline.strategies.what import Gradients
from syncline.strategies.when import Every
from syncline.strategies.whom import Everyone


@dataclass(frozen=True)
class AllReduce(AnswersMethod):
    """gradients | every(1) | everyone, with any encoding."""

    what: Gradients
    when: Every
    whom: Everyone
    how: Exact | BF16 | Int8 | OneBit | TopK | PowerSGD

    title = "An all-reduce of gradients"
    because: ClassVar[Mapping[str, str]] = {
        "what": "An all-reduce sums gradients or averages updates; whole models compete in pairs.",
        "when": "An all-reduce needs all workers at the same step.",
        "whom": "All workers sum their gradients with each other.",
    }
    is_lock_step = True
    fits_inside_group = fits_across_groups = True
    recovery: ClassVar[Recovery] = "equal"

    @property
    def sums_exact_gradients(self) -> bool:
        return self.how == Exact()

    def misfit(self) -> Misfit | None:
        if self.when.steps > 1:
            return Misfit(
                "when",
                f"Gradients summed every {self.when.steps} steps would leave the steps between without an update. "
                "Let the workers step by themselves in between, or use a larger --batch.",
                None,
            )
        return None

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        del optimizer_slots
        return float(model.encoded_bytes(self.how)) if workers > 1 else 0.0

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        del optimizer_slots
        if workers == 1:
            return ()
        sent = float(model.encoded_bytes(self.how))
        if isinstance(self.how, PowerSGD):  # two sums, of the two thin matrices
            return tuple(Traffic(pattern="all-reduce", sent_bytes=sent / 2, encoding=self.how) for _ in range(2))
        pattern: Pattern = "all-reduce" if self.how == Exact() else "all-gather"
        return (Traffic(pattern=pattern, sent_bytes=sent, encoding=self.how),)

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        del workers
        return [
            "After each backward pass all workers sum their gradients, and each applies the sum.",
            f"Each worker sends {model.amount(self.how)}.",
        ]

    def exchange(self, replica: Replica) -> AllReduceExchange:
        return AllReduceExchange(replica, self)


def exact_all_reduce(replica: Replica) -> AllReduceExchange:
    """What a worker does that is alone, whatever the strategy."""
    return AllReduce(Gradients(), Every(), Everyone(), Exact()).exchange(replica)


class AllReduceExchange(LocalExchange):
    """An `Exchange`: the weighted sum of all gradients before every update.

    Equal gradients on equal parameters give equal parameters, so nothing else is ever exchanged.
    """

    def __init__(self, replica: Replica, method: AllReduce) -> None:
        super().__init__(replica, method)
        self._is_exact = method.how == Exact()
        self._reducers = [
            method.how.reducer(replica.collective, [p.shape for p in members], replica.seed)
            for members in replica.gradients.members
        ]
        self._ahead = overlap.overlapped_allreduces(replica) if self._is_exact else {}

    def before_backward(self, weight: float) -> None:
        """Start to sum gradients as backward completes them."""
        for summing in self._ahead.values():
            summing.begin(weight)

    def before_update(self, weight: float) -> bool:
        """Sum the gradients. The piggybacked values are part of the buffer, but an encoding must not touch them."""
        gradients, collective = self.replica.gradients, self.replica.collective
        if self._is_exact:
            for number, flat in enumerate(gradients.flats):
                if number in self._ahead:
                    self._ahead[number].finish(weight)
                else:
                    collective.all_reduce_(flat, weight)
        else:
            self._sum_encoded(weight)
        self.replica.log.exchanged()
        return True

    def _sum_encoded(self, weight: float) -> None:
        gradients = self.replica.gradients
        before = [reducer.state() for reducer in self._reducers]
        try:
            for flat, reducer in zip(gradients.flats, self._reducers, strict=True):
                count = flat.numel() - (gradients.piggybacked.numel() if flat is gradients.flats[0] else 0)
                if count:
                    reducer.all_reduce_(flat[:count], weight)
            self.replica.collective.all_reduce_(gradients.piggybacked, weight)
        except PeerFailed:
            for reducer, state in zip(self._reducers, before, strict=True):
                reducer.load(state)  # the step will be repeated, so its residuals do not count
            raise

    def combine(self, weight: float, round: int) -> None:
        """A hierarchy that has shrunk to one group has nothing to combine."""
        del weight, round
        assert self.replica.collective.size == 1, "between groups, gradients are summed before the update"

    def close(self) -> None:
        for summing in self._ahead.values():
            summing.close()

    def private_state(self) -> dict[str, Any] | None:
        """The residuals: what this worker has not sent yet."""
        return None if self._is_exact else {"reducers": [c.state() for c in self._reducers]}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Load the residuals. A worker alone uses this exchange for any strategy, so the state may be another's."""
        for reducer, saved in zip(self._reducers, state.get("reducers", ()), strict=False):
            reducer.load(saved)

    def replacement_state(self) -> dict[str, Any] | None:
        """As this worker's, without residuals: those of a failed worker are lost with it."""
        return None if self._is_exact else {"reducers": [{**c.state(), "residual": None} for c in self._reducers]}
