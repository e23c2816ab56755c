"""Updates, mixed with neighbours only: gossip. Nobody ever speaks to all the others.

Each worker steps by itself, and its parameters x_i are replaced by a mean of its own and its neighbours', with the
weights W of the topology (`algorithms/mixing.py`):

    x_i <- sum_j W_ij (x_j - lr g_j)

W is doubly stochastic, so the mean over all workers moves exactly as if everybody had averaged (D-PSGD, Lian et al.
2017; GossipGraD, Daily et al. 2018), and what the workers disagree on shrinks by the spectral gap of W in each step.

Here: both rhythms. `MixNeighbours`: every n steps, all at the same time. `MixAtAnyTime`: AD-PSGD (Lian, Zhang, Zhang &
Liu 2018), in which every second worker, whenever it has done a step, averages with one of the others, chosen at random,
which need not even notice. That needs memory that both can reach: x_j is averaged where it lies, under a lock that
lasts as long as one averaging.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from syncline.algorithms.mixing import TOPOLOGIES, bipartite, choose_passive
from syncline.comms.lock import LOCK_BYTES, SharedLock
from syncline.strategies.exchange import PlainExchange, Replica
from syncline.strategies.flat import FlatParameters, distance

__all__ = ["MixAtAnyTime", "MixNeighbours"]

_LOOK_EVERY = 50
"""In how many exchanges the workers look once how far they are apart: it costs an all-reduce."""
_LOCK_TIMEOUT_S = 60.0


class _OwnModels(PlainExchange):
    """What both rhythms have in common: every worker has a model of its own; what they share is the mean."""

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


class MixNeighbours(_OwnModels):
    """An `Exchange`: after every n steps each worker mixes its model with its neighbours'."""

    def __init__(self, replica: Replica, topology: str, steps: int) -> None:
        super().__init__(replica)
        self._topology, self._steps = TOPOLOGIES[topology], steps
        self._step = replica.step

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
        self.replica.log.exchanged(disagreement=apart)


class MixAtAnyTime(_OwnModels):
    """An `Exchange`: each worker at its own pace; every second one averages with another after each of its steps."""

    is_asynchronous = True

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._bytes = 0
        replica.log.count_bytes(lambda: self._bytes)

    def begin(self) -> None:
        """Everybody's parameters move into memory that the others can reach."""
        super().begin()
        collective, numel = self.replica.collective, self._flat.numel
        memory = collective.share(numel * collective.size, self._flat.dtype)
        self._models = [memory[r * numel : (r + 1) * numel] for r in range(collective.size)]
        lock_memory = collective.share(LOCK_BYTES * collective.size, torch.uint8)
        if collective.rank == 0:
            for rank in range(collective.size):
                SharedLock.initialise(lock_memory, rank * LOCK_BYTES)
        collective.barrier()
        self._locks = [SharedLock(lock_memory, rank * LOCK_BYTES) for rank in range(collective.size)]
        self._x = self._models[collective.rank]
        self._flat.read(self._x)
        self._flat.move_to(self._x)
        self._step = self.replica.step
        active, _ = bipartite(range(collective.size))
        self._is_active = collective.rank in active and collective.size > 1
        collective.barrier()

    def update(self) -> None:
        """The optimiser writes while nobody averages."""
        with self._locks[self.replica.collective.rank].held(_LOCK_TIMEOUT_S):
            super().update()

    def after_update(self, weight: float) -> bool:
        """An active worker averages with a passive one."""
        del weight
        self._step += 1
        if not self._is_active:
            return False
        collective, log = self.replica.collective, self.replica.log
        other = choose_passive(collective.rank, range(collective.size), self._step, self.replica.seed)
        assert other is not None, "an active worker has somebody to ask"
        mine, theirs = self._x, self._models[other]
        with ExitStack() as locks:
            for rank in sorted((collective.rank, other)):  # always in the same order, so that nobody waits in a circle
                locks.enter_context(self._locks[rank].held(_LOCK_TIMEOUT_S))
            apart = distance(mine, theirs) / 2 if log.wants_disagreement() else None
            mean = torch.add(mine, theirs).mul_(0.5)
            mine.copy_(mean)
            theirs.copy_(mean)
        self._bytes += 2 * mine.nbytes  # its own model to the other one, and the other one's to it
        log.exchanged(disagreement=apart)
        return False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The mean of all models. Everybody is here, so nobody averages."""
        collective = self.replica.collective
        collective.barrier()
        with super().shared():
            yield
        collective.barrier()

    def settle(self) -> None:
        """A copy of its own for every worker, with the mean."""
        self.replica.collective.barrier()
        mean = self._mean()
        self.replica.collective.barrier()
        self._flat.move_to(mean)
