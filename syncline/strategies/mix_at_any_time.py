"""Updates, averaged with one other at a time and at any time: AD-PSGD (Lian, Zhang, Zhang & Liu 2018).

Every second worker, whenever it has done a step, averages with one of the others, chosen at random, which need not even
notice. That needs memory that both can reach: x_j is averaged where it lies, under a lock that lasts as long as one
averaging. Not here: gossip in step (`mix_neighbours.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from syncline.algorithms.mixing import bipartite, choose_passive
from syncline.comms.collective import Collective
from syncline.comms.lock import LOCK_BYTES, SharedLock
from syncline.strategies.exchange import Replica
from syncline.strategies.flat import distance
from syncline.strategies.mix_neighbours import OwnModels

__all__ = ["MixAtAnyTime"]

_LOCK_TIMEOUT_S = 60.0


class MixAtAnyTime(OwnModels):
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
        # Of each worker, the steps it has done, and those that another one has in its model, too.
        self._done, self._known = collective.share(2 * collective.size, torch.int64).view(2, -1)
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

    def merge(self, survivors: Collective) -> None:
        """The mean of the survivors' models; until they stopped, they may have averaged into each other's."""
        survivors.barrier()
        self._flat.write(self._x)
        super().merge(survivors)

    def effects(self) -> dict[int, int] | None:
        """Of the others, what was averaged into another model."""
        known = {rank: self.replica.step + count for rank, count in enumerate(self._known.tolist())}
        return {**known, self.replica.collective.rank: self._step}

    def after_update(self, weight: float) -> bool:
        """An active worker averages with a passive one."""
        del weight
        self._step += 1
        self._done[self.replica.collective.rank] = self._step - self.replica.step
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
            for rank in (collective.rank, other):
                self._known[rank] = self._done[rank]
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

    def close(self) -> None:
        """From now on this worker's parameters are its own."""
        self._flat.move_to(self._x.clone())

    def settle(self) -> None:
        """A copy of its own for every worker, with the mean."""
        self.replica.collective.barrier()
        mean = self._mean()
        self.replica.collective.barrier()
        self._flat.move_to(mean)
