"""One strategy after another: `allreduce until epoch 1, then sparknet(10)`.

Here: `TakeTurns`, which hands each moment to the exchange of the phase the run is in. A phase ends at a step that all
workers know; before the next forward pass every replica takes what the workers have in common, and the first one's
optimiser, as if the run were resumed, and the next exchange begins from there. (Workers that sum gradients stay equal
only if their optimisers are.) That is also how a run warms up in full precision before its gradients are encoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from syncline.comms.collective import Collective
from syncline.strategies.combine_updates import adopt_optimizer
from syncline.strategies.exchange import Exchange, Recovery, Replica

__all__ = ["TakeTurns", "Turn"]


@dataclasses.dataclass(frozen=True)
class Turn:
    """A phase: what it is called, the step at which it ends (None: never), and how its exchange is made."""

    name: str
    end: int | None
    make: Callable[[Replica], Exchange]


class TakeTurns:
    """An `Exchange` made of several, one at a time."""

    def __init__(self, replica: Replica, turns: Sequence[Turn]) -> None:
        self._replica, self._turns = replica, list(turns)
        self._step = replica.step
        self._index = self._index_at(self._step)
        self._current = self._turn.make(replica)

    @property
    def is_asynchronous(self) -> bool:
        """As the phase is."""
        return self._current.is_asynchronous

    @property
    def recovery(self) -> Recovery:
        """As the phase does."""
        return self._current.recovery

    def effects(self) -> dict[int, int] | None:
        """As the phase does."""
        return self._current.effects()

    def merge(self, survivors: Collective) -> None:
        """As the phase does."""
        self._current.merge(survivors)

    def begin(self) -> None:
        """The phase in which the run begins or goes on."""
        self._current.begin()

    def before_forward(self) -> None:
        """Change over, if the phase has ended with the last step."""
        if self._index_at(self._step) != self._index:
            self._change_over()
        self._current.before_forward()

    def before_backward(self, weight: float) -> None:
        """As the phase does."""
        self._current.before_backward(weight)

    def before_update(self, weight: float) -> bool:
        """As the phase does."""
        return self._current.before_update(weight)

    def update(self) -> None:
        """As the phase does."""
        self._current.update()

    def after_update(self, weight: float) -> bool:
        """As the phase does."""
        self._step += 1
        return self._current.after_update(weight)

    def may_go_on(self, limit_s: float) -> bool:
        """As the phase does."""
        return self._current.may_go_on(limit_s)

    def must_meet(self, step: int) -> bool:
        """Where a phase ends, too."""
        return step == self._turn.end or self._current.must_meet(step)

    def shared(self) -> AbstractContextManager[None]:
        """As the phase does."""
        return self._current.shared()

    def settle(self) -> None:
        """As the phase does."""
        self._current.settle()

    def private_state(self) -> dict[str, Any] | None:
        """The phase, and its own."""
        return {"turn": self._index, "state": self._current.private_state()}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again, but not what a phase has left that was just over: the next one begins without it."""
        if state["turn"] == self._index and state["state"] is not None:
            self._current.load_private_state(state["state"])

    def carried_state(self) -> dict[str, Any] | None:
        """The phase, and its own."""
        return {"turn": self._index, "state": self._current.carried_state()}

    def newcomers_state(self) -> dict[str, Any] | None:
        """The phase, and its own."""
        return {"turn": self._index, "state": self._current.newcomers_state()}

    def close(self) -> None:
        """The phase's."""
        self._current.close()

    @property
    def _turn(self) -> Turn:
        return self._turns[self._index]

    def _index_at(self, step: int) -> int:
        return next(i for i, turn in enumerate(self._turns) if turn.end is None or step < turn.end)

    def _change_over(self) -> None:
        self._current.settle()
        self._current.close()
        adopt_optimizer(self._replica.optimizer, self._replica.collective)
        self._index = self._index_at(self._step)
        self._replica.log.switched(self._step, self._turn.name)
        self._current = self._turn.make(dataclasses.replace(self._replica, step=self._step))
        self._current.begin()
