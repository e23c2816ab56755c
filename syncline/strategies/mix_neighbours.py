"""Updates, mixed with neighbours only: gossip. Nobody ever speaks to all the others.

Each worker steps by itself, and every n steps its parameters x_i are replaced by a mean of its own and its neighbours',
with the weights W of the topology (`algorithms/mixing.py`):

    x_i <- sum_j W_ij (x_j - lr g_j)

W is doubly stochastic, so the mean over all workers moves exactly as if everybody had averaged (D-PSGD, Lian et al.
2017; GossipGraD, Daily et al. 2018), and what the workers disagree on shrinks by the spectral gap of W each time.

Here: `MixNeighbours`, all at the same time, and `OwnModels`, what it shares with `mix_at_any_time.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from syncline.algorithms.mixing import TOPOLOGIES
from syncline.comms.collective import Collective
from syncline.strategies.exchange import PlainExchange, Recovery, Replica
from syncline.strategies.flat import FlatParameters, distance

__all__ = ["MixNeighbours", "OwnModels"]

_LOOK_EVERY = 50
"""In how many exchanges the workers look once how far they are apart: it costs an all-reduce."""


class OwnModels(PlainExchange):
    """What both rhythms have in common: every worker has a model of its own; what they share is the mean."""

    recovery: Recovery = "merge"

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._flat = FlatParameters(replica.gradients.parameters, what="gossip")
        self._own: torch.Tensor | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The mean of all models; afterwards everybody has its own again."""
        self._own = self._flat.read()
        self._flat.write(self._mean())
        try:
            yield
        finally:
            self._restore(self._own)
            self._own = None

    def settle(self) -> None:
        """The mean of all models."""
        self._flat.write(self._mean())

    def merge(self, survivors: Collective) -> None:
        """The mean of the survivors' models, for good: new neighbours start equal."""
        mean = self._flat.read()
        survivors.sum_(mean, 1.0 / survivors.size)
        survivors.barrier()  # from here on nobody can be stopped in the middle
        self._flat.write(mean)

    def newcomers_state(self) -> dict[str, Any] | None:
        """As this worker's."""
        return self.private_state()

    def private_state(self) -> dict[str, Any]:
        """This worker's own model and optimiser."""
        own = self._own if self._own is not None else self._flat.read()
        return {"optimizer": self.replica.optimizer.state_dict(), "own": own.clone()}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take them up again."""
        self.replica.optimizer.load_state_dict(state["optimizer"])
        self._flat.write(state["own"].to(self._flat.device))

    def _mean(self) -> torch.Tensor:
        mean = self._flat.read()
        with self.replica.log.outside():
            self.replica.collective.sum_(mean, 1.0 / self.replica.collective.size)
        return mean

    def _restore(self, own: torch.Tensor) -> None:
        self._flat.write(own)


class MixNeighbours(OwnModels):
    """An `Exchange`: after every n steps each worker mixes its model with its neighbours'."""

    def __init__(self, replica: Replica, topology: str, steps: int) -> None:
        super().__init__(replica)
        self._topology, self._steps = TOPOLOGIES[topology], steps
        self._step = self._mixed_at = replica.step

    def effects(self) -> dict[int, int] | None:
        """Of the others, what they had when this worker last mixed."""
        size, rank = self.replica.collective.size, self.replica.collective.rank
        return {**dict.fromkeys(range(size), self._mixed_at), rank: self._step}

    def begin(self) -> None:
        """Everybody starts from the first worker's parameters."""
        super().begin()
        self._x = self.replica.collective.allocate(self._flat.numel, self._flat.dtype, self._flat.device)

    def after_update(self, weight: float) -> bool:
        """Mix, if it is time to; the riders travel to everyone."""
        self._step += 1
        if self._step % self._steps:
            return False
        self.mix(self._step // self._steps - 1)
        self.replica.collective.sum_(self.replica.gradients.riders, weight)
        return True

    def mix(self, round: int) -> None:
        """Mix now, for the `round`-th time."""
        collective = self.replica.collective
        self._flat.read(self._x)
        apart = None
        if round % _LOOK_EVERY == 0 and collective.size > 1:
            apart = distance(self._x, self._mean())
        collective.mix_(self._x, self._topology(range(collective.size), round, self.replica.seed))
        self._flat.write(self._x)
        self._mixed_at = self._step
        self.replica.log.exchanged(disagreement=apart)
