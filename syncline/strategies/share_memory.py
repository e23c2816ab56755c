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

from syncline.strategies.exchange import PlainExchange, Replica
from syncline.strategies.flat import FlatParameters

__all__ = ["ShareMemory"]


class ShareMemory(PlainExchange):
    """An `Exchange` in which nothing is sent: the replicas' parameters are one and the same memory."""

    is_asynchronous = True

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._flat = FlatParameters(replica.gradients.parameters, what="hogwild")

    def begin(self) -> None:
        """Everybody's parameters move into the memory that all see, with the first worker's values."""
        super().begin()
        collective = self.replica.collective
        self._memory = collective.share(self._flat.numel, self._flat.dtype)
        if collective.rank == 0:
            self._flat.read(self._memory)
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
        super().update()
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

    def private_state(self) -> dict[str, Any]:
        """This worker's optimiser: the momentum is its own."""
        return {"optimizer": self.replica.optimizer.state_dict()}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        self.replica.optimizer.load_state_dict(state["optimizer"])
