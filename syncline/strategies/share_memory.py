"""Gradients, at any time, into one copy in shared memory: Hogwild! (Recht, Re, Wright & Niu 2011).

All workers train the same numbers. Worker k reads theta as it is, computes g_k on its samples, and its own optimiser
writes into theta, while others may be reading and writing, too; there is no lock and no exchange:

    theta <- theta - lr (n_k / N) g_k            momentum, if any, is the worker's own

The weight n_k / N makes each sample count as much as in a synchronous step over N samples. An update may be computed
from a mixture of older and newer numbers, and of two writes to one number at the same moment one can be lost; the paper
shows that this hardly matters as long as it is rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from syncline.comms.collective import Collective
from syncline.strategies.exchange import PlainExchange, Recovery, Replica
from syncline.strategies.flat import FlatParameters

__all__ = ["ShareMemory"]


class ShareMemory(PlainExchange):
    """An `Exchange` in which nothing is sent: the replicas' parameters are one and the same memory."""

    is_asynchronous = True
    recovery: Recovery = "merge"

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._flat = FlatParameters(replica.gradients.parameters, what="hogwild")
        self._step = replica.step

    def begin(self) -> None:
        """Everybody's parameters move into the memory that all see, with the first worker's values."""
        super().begin()
        collective = self.replica.collective
        self._memory = collective.share(self._flat.numel, self._flat.dtype)
        if collective.rank == 0:
            self._flat.read(self._memory)
        # How many updates each worker has begun, and how many it has finished, where all can see it.
        self._begun, self._finished = collective.share(2 * collective.size, torch.int64).view(2, -1)
        collective.barrier()
        self._flat.move_to(self._memory)

    def before_update(self, weight: float) -> bool:
        """Let each sample count as in a step of all workers together."""
        gradients = [p.grad for p in self._flat.parameters if p.grad is not None]
        if weight != 1.0 and gradients:
            torch._foreach_mul_(gradients, weight)
        return False

    def update(self) -> None:
        """Into the memory that all see."""
        rank = self.replica.collective.rank
        self._begun[rank] += 1
        super().update()
        self._finished[rank] += 1
        self.replica.log.exchanged()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Everybody is here, so nobody writes; and nobody leaves before all have seen what they wanted to see."""
        yield
        self.replica.collective.barrier()

    def settle(self) -> None:
        """A copy of its own for every worker."""
        self.replica.collective.barrier()
        self._flat.move_to(self._memory.clone())
        self.replica.collective.barrier()

    def after_update(self, weight: float) -> bool:
        """Count the step, also if there was nothing to write in it."""
        del weight
        self._step += 1
        self._finished[self.replica.collective.rank] = self._step - self.replica.step
        return False

    def effects(self) -> dict[int, int] | None:
        """All that was finished. Of an update in whose middle its worker was lost some numbers may be there, too."""
        return {rank: self.replica.step + count for rank, count in enumerate(self._finished.tolist())}

    def merge(self, survivors: Collective) -> None:
        """Nobody writes any more: what is in the memory now is everybody's."""
        survivors.barrier()
        self._flat.write(self._memory)

    def newcomers_state(self) -> dict[str, Any] | None:
        """As this worker's."""
        return self.private_state()

    def close(self) -> None:
        """From now on this worker's parameters are its own."""
        self._flat.move_to(self._memory.clone())

    def private_state(self) -> dict[str, Any]:
        """This worker's optimiser: the momentum is its own."""
        return {"optimizer": self.replica.optimizer.state_dict()}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        self.replica.optimizer.load_state_dict(state["optimizer"])
