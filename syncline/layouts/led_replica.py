"""How the first worker of a replica leads the others: they do in each moment of a step what it says.

Here: `LedReplica`, the leader's words in memory that the replica shares, and what the workers do then; `StateOfLeader`,
the private state of a replica. Not here: the moments of a step (`between_replicas.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from syncline.comms.collective import Collective
from syncline.layouts.held_replica import HeldReplica
from syncline.layouts.replica_optimizer import ReplicaOptimizer
from syncline.strategies.exchange import Exchange, Replica
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.methods.local_sgd import adopt_optimizer

_DONE, _UPDATE, _LOAD = 0.0, 1.0, 2.0
"""What a leader says: the moment is over, update, load the optimizer's state."""
_LIVE = "live"
"""The private state of a strategy as a worker carries it from View to View, without the optimizer that it has."""


class Leader(NamedTuple):
    """What a leader has beside what all workers have: the strategy's exchange and its view of the replica."""

    exchange: Exchange
    gradients: GradientBuffer
    optimizer: ReplicaOptimizer
    leaders: Collective


class LedReplica:
    """One worker's part in a replica that is led; `next_step` is the step whose update would be next."""

    def __init__(self, replica: Replica, next_step: Callable[[], int]) -> None:
        self._replica, self._next_step = replica, next_step
        self._piggybacked = replica.gradients.piggybacked
        self.leader: Leader | None = None
        """None on the other workers."""
        self.updated_at: int | None = None
        """The last step whose update has begun."""

    def hold(self, held: HeldReplica) -> None:
        """The replica is in the memory that its workers share; all of them call this together."""
        self.held = held
        # Two slots, so that the leader can continue while the others read.
        self._words = held.allocate(2 * (2 + self._piggybacked.numel()), torch.float64).view(2, -1)
        self._said = 0

    @property
    def exchange(self) -> Exchange:
        """The strategy's, of which only the leader is asked."""
        assert self.leader is not None, "only leaders hold something of their own"
        return self.leader.exchange

    def together(self, act: Callable[[Leader], float | None]) -> float:
        """The leader acts as the strategy says, the others as it says; all return its result."""
        leader = self.leader
        if leader is None:
            return self._follow()
        leader.gradients.piggybacked.copy_(self._piggybacked)
        result = float(act(leader) or 0.0)
        self._piggybacked.copy_(leader.gradients.piggybacked)
        self._say(_DONE, result)
        return result

    def update(self) -> None:
        """What a step of the strategy's optimizer does: all workers of the replica update what they own."""
        self._say(_UPDATE)
        # A barrier that all have reached is complete for all of them: from here on all update, even if some die.
        self.updated_at = self._next_step()
        self._update_own()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Give the whole replica the state that the leader has loaded."""
        self._say(_LOAD)
        self._load_together(state)

    def give_gradients(self) -> None:
        """Give the leader the whole gradient, in the order of the parameters."""
        held = self.held
        held.inside.barrier()  # all have scaled what they own
        if self.leader is None:
            return
        whole, first = self.leader.gradients.flats[0], 0
        for leaf in itertools.chain(*held.lanes):
            size = leaf.high - leaf.low
            whole[leaf.low : leaf.high] = held.gradients[first : first + size]
            first += size

    def _say(self, word: float, result: float = 0.0) -> None:
        slot = self._words[self._said % 2]
        slot[0], slot[1] = word, result
        slot[2:] = self._piggybacked
        self._said += 1
        self.held.inside.barrier()

    def _follow(self) -> float:
        while True:
            slot = self._words[self._said % 2]
            self._said += 1
            self.held.inside.barrier()
            word = float(slot[0])
            if word == _UPDATE:
                self._update_own()
            elif word == _LOAD:
                self._load_together(None)
            else:
                self._piggybacked.copy_(slot[2:])
                return float(slot[1])

    def _update_own(self) -> None:
        self.held.optimizer.update()
        self.held.inside.barrier()

    def _load_together(self, state: dict[str, Any] | None) -> None:
        held, optimizer = self.held, self._replica.optimizer
        held.optimizer.leave()
        if state is not None:
            optimizer.load_state_dict(state)
        adopt_optimizer(optimizer, held.inside)
        held.divide_optimizer()
        held.inside.barrier()
        held.optimizer.confirm()


class StateOfLeader:
    """The private state of a replica for an `Exchange`: what the strategy's exchange of its leader has."""

    _led: LedReplica

    def private_state(self) -> dict[str, Any] | None:
        return self._led.exchange.private_state() if self._led.leader is not None else None

    def carried_state(self) -> dict[str, Any] | None:
        return {_LIVE: self._led.exchange.carried_state()} if self._led.leader is not None else None

    def replacement_state(self) -> dict[str, Any] | None:
        return {_LIVE: self._led.exchange.replacement_state()} if self._led.leader is not None else None

    def load_private_state(self, state: dict[str, Any]) -> None:
        leader = self._led.leader
        if leader is None:
            return
        if _LIVE not in state:
            leader.exchange.load_private_state(state)
        elif state[_LIVE] is not None:
            with leader.optimizer.keeping_state():
                leader.exchange.load_private_state(state[_LIVE])
