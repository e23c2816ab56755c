"""Models tied to a centre by a spring: EASGD (Zhang, Choromanska & LeCun 2015), as in Theano-MPI.

Every n of its steps worker k and the centre, which the servers keep, pull at each other, one worker at a time:

    d = rate (x_k - x~)        x_k <- x_k - d        x~ <- x~ + d
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from syncline.algorithms.outer import elastic
from syncline.strategies.exchange import Replica
from syncline.strategies.flat import distance
from syncline.strategies.server_line import WithServers

__all__ = ["PullElastic"]


class PullElastic(WithServers):
    """An `Exchange`: every n steps a worker's model and the centre pull at each other."""

    is_asynchronous = True

    def __init__(self, replica: Replica, outer: elastic, steps: int) -> None:
        super().__init__(replica, "elastic", replica.optimizer, outer.rate)
        self._outer, self._steps = outer, steps
        self._step = replica.step
        self._own: torch.Tensor | None = None

    def after_update(self, weight: float) -> bool:
        """Pull at the centre, and be pulled, if it is time."""
        del weight
        self._step += 1
        if self._step % self._steps == 0:
            before = self._flat.read(self._buffer)
            own = before.clone() if self.replica.log.wants_disagreement() else None
            self._servers.pull_elastic(self._buffer, self._step)
            self._flat.write(self._buffer)
            apart = None
            if own is not None:  # x_k moved by rate (x_k - centre)
                centre = own + (self._buffer - own) / self._outer.rate
                apart = distance(own, centre)
            self._tell(disagreement=apart)
        return False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The centre; afterwards everybody has its own model again."""
        self._ensure_begun()
        self._own = self._flat.read()
        self.replica.collective.barrier()
        self._flat.write(self._pull())
        try:
            yield
        finally:
            self._flat.write(self._own)
            self._own = None
        self.replica.collective.barrier()

    def settle(self) -> None:
        """The centre."""
        self._ensure_begun()
        self.replica.collective.barrier()
        self._flat.write(self._pull())
        self.replica.collective.barrier()

    def effects(self) -> dict[int, int] | None:
        """Of the others, what they had when they last pulled at the centre."""
        reached = super().effects()
        return None if reached is None else {**reached, self.replica.collective.rank: self._step}

    def _of_worker(self) -> dict[str, Any]:
        """This worker's own model and optimiser."""
        own = self._own if self._own is not None else self._flat.read()
        return {"optimizer": self.replica.optimizer.state_dict(), "own": own.clone()}

    def _take_up(self, saved: dict[str, Any]) -> None:
        self.replica.optimizer.load_state_dict(saved["optimizer"])
        self._flat.write(saved["own"])
