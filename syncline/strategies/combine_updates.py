"""Updates, every n steps, with everyone: workers train by themselves and combine what they have changed.

Let theta~ be the anchor, which all workers share, and theta_k worker k's parameters n steps later. With w_k its part of
the samples in these steps,

    delta = sum_k w_k (theta_k - theta~)        theta~ <- outer(theta~, delta)        theta_k <- theta~

With the outer optimiser `average` this is parameter averaging (SparkNet, Moritz et al. 2016); averaging the optimisers'
state as well is Deeplearning4j's; block momentum is BMUF (Chen & Huo 2016); Nesterov momentum is DiLoCo (Douillard et
al. 2023). With n = 1, `average` and plain SGD it is `gradients | every(1)`.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import torch

from syncline.algorithms.outer import average
from syncline.comms.collective import Collective
from syncline.strategies.combine import make_combiner
from syncline.strategies.exchange import PlainExchange, Recovery, Replica
from syncline.strategies.flat import FlatParameters
from syncline.strategies.how import How
from syncline.strategies.what import Updates

__all__ = ["CombineUpdates", "adopt_optimizer", "state_in_common"]


_PLACE = struct.Struct("<Qd")  # the step of the last exchange, the weight since


class CombineUpdates(PlainExchange):
    """An `Exchange`: local steps, and every n of them an outer one."""

    recovery: Recovery = "merge"

    def __init__(self, replica: Replica, what: Updates, steps: int, how: How) -> None:
        super().__init__(replica)
        self._at = self._exchanged_at = replica.step
        self._what, self._steps = what, steps
        self._flat = FlatParameters(replica.gradients.parameters, what="updates")
        shapes = [p.shape for p in self._flat.parameters]
        self._combiner = make_combiner(how, replica.collective, shapes, replica.seed)
        self._steps_since = 0
        self._weight_since = 0.0
        self._is_alone = replica.collective.size == 1 and isinstance(what.outer, average)

    def begin(self) -> None:
        """Everybody takes the first worker's parameters; they are the first anchor."""
        super().begin()
        self._anchor = self._flat.read()
        self._outer_state = dict(self._what.outer.initial_state(self._anchor))
        # Where the collective can, the change lies where it is combined without being copied.
        self._delta = self.replica.collective.allocate(self._flat.numel, self._flat.dtype, self._flat.device)

    def after_update(self, weight: float) -> bool:
        """Count the step, and exchange if it is time to."""
        self._at += 1
        self._steps_since += 1
        self._weight_since += weight
        if self._steps_since < self._steps:
            return False
        self.replica.collective.sum_(self.replica.gradients.riders, weight)
        self.settle()
        return True

    def start_from_here(self) -> None:
        """Somebody else has changed the parameters, on all workers alike: they are the anchor now."""
        self._anchor = self._flat.read()

    def settle(self) -> None:
        """Exchange what was done since the last time."""
        if self._steps_since:
            self.combine(self._weight_since / self._steps_since)
            self._steps_since, self._weight_since, self._exchanged_at = 0, 0.0, self._at

    def combine(self, weight: float) -> None:
        """Exchange now; `weight` is this worker's part of the samples since the last time."""
        if self._is_alone:
            return  # the mean of one is that one, to the bit
        torch.sub(self._flat.read(), self._anchor, out=self._delta)
        own = self._delta.clone() if self.replica.log.wants_disagreement() else None
        self._combiner.sum_(self._delta, weight)
        apart = None
        if own is not None:  # the parameters are the anchor and the change, so the anchor drops out of their difference
            centre = torch.linalg.vector_norm(self._anchor + self._delta).clamp_min(1e-12)
            apart = float(torch.linalg.vector_norm(own - self._delta) / centre)
        self._anchor, state = self._what.outer.step(self._anchor, self._delta, self._outer_state)
        self._outer_state = dict(state)
        self._flat.write(self._anchor)
        if self._what.optimizer_state:
            self._average_optimizer_state(weight)
        self.replica.log.exchanged(disagreement=apart)

    def effects(self) -> dict[int, int] | None:
        """Of the others, what was there at the last exchange."""
        size, rank = self.replica.collective.size, self.replica.collective.rank
        return {**dict.fromkeys(range(size), self._exchanged_at), rank: self._at}

    def merge(self, survivors: Collective) -> None:
        """Exchange early, among those who are left; who missed the end of the last exchange takes it over first."""
        places = [_PLACE.unpack(data) for data in survivors.gather(_PLACE.pack(self._exchanged_at, self._weight()))]
        last = max(at for at, _ in places)
        anchor, outer = self._anchor, dict(self._outer_state)
        if any(at != last for at, _ in places):
            source = next(rank for rank, (at, _) in enumerate(places) if at == last)
            anchor = anchor.clone()
            survivors.broadcast_(anchor, source)
            file = io.BytesIO()
            torch.save(dict(outer), file)
            outer = torch.load(io.BytesIO(survivors.gather(file.getvalue())[source]), weights_only=True)
        is_behind = self._exchanged_at != last  # all that it had done was in that exchange
        weights = [weight if at == last else 0.0 for at, weight in places]
        total = sum(weights)
        delta = torch.zeros_like(anchor) if is_behind else self._flat.read() - anchor
        if total:
            survivors.sum_(delta, weights[survivors.rank] / total)
            anchor, state = self._what.outer.step(anchor, delta, outer)
            outer = dict(state)
        survivors.barrier()  # from here on nobody can be stopped in the middle
        self._anchor, self._outer_state = anchor, outer
        self._flat.write(self._anchor)
        self._steps_since, self._weight_since = 0, 0.0
        self._exchanged_at = max(last, self._exchanged_at)

    def newcomers_state(self) -> dict[str, Any] | None:
        """As this worker's, but nothing that could not be sent yet."""
        return {**self.private_state(), "combiner": {**self._combiner.state(), "residual": None}}

    def _weight(self) -> float:
        """This worker's part of the samples since the last exchange."""
        return self._weight_since / self._steps_since if self._steps_since else 0.0

    def private_state(self) -> dict[str, Any]:
        """This worker's optimiser, the outer one, and what could not be sent yet."""
        return {
            "optimizer": self.replica.optimizer.state_dict(),
            "outer": dict(self._outer_state),
            "combiner": self._combiner.state(),
        }

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        self.replica.optimizer.load_state_dict(state["optimizer"])
        self._outer_state = dict(state["outer"])
        self._combiner.load(state["combiner"])

    def _average_optimizer_state(self, weight: float) -> None:
        for value in state_in_common(self.replica.optimizer, self.replica.collective):
            self.replica.collective.sum_(value, weight)


def state_in_common(optimizer: torch.optim.Optimizer, collective: Collective) -> list[torch.Tensor]:
    """What the optimiser remembers of each number, in the same order on every worker; nothing unless all have it.

    A worker whose every loss so far was NaN has not stepped yet, and so has nothing to remember.
    """
    found = [
        value
        for slots in optimizer.state.values()
        for value in slots.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    ]
    return found if len(set(collective.gather(b"%d" % len(found)))) == 1 else []


def adopt_optimizer(optimizer: torch.optim.Optimizer, collective: Collective) -> None:
    """Give every worker the first one's optimiser: its state and its settings."""
    if collective.size == 1:
        return
    file = io.BytesIO()
    if collective.rank == 0:
        torch.save(optimizer.state_dict(), file)
    first = collective.gather(file.getvalue())[0]
    if collective.rank != 0:
        optimizer.load_state_dict(torch.load(io.BytesIO(first), weights_only=True))
