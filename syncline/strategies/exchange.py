"""The seam between a training step and a strategy: what a strategy does at the named moments of a step.

Here: the `Exchange` protocol, `PlainExchange`, whose moments do nothing and which strategies build on, and `Replica`,
the worker's copy that they work on. Not here: the strategies themselves (one file each) and who calls the moments
(`workers/step.py`, for the built-in loop and for `optimizer.step()` alike).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from syncline.algorithms.brackets import Contested
from syncline.comms.collective import Collective
from syncline.strategies.gradients import GradientBuffer

if TYPE_CHECKING:
    from syncline.comms.parameter_server.client import ParameterServers

__all__ = ["Exchange", "NoLog", "PlainExchange", "Recovery", "Replica", "StrategyLog", "adopt_first"]


Recovery = Literal["equal", "merge", "saved"]
"""How the others go on when a worker is lost.

equal   the replicas are equal up to the step in flight: who is furthest gives its own to those who are behind or new
merge   each holds something of its own: they bring it together (`Exchange.merge`); of the lost worker's steps it is
        known which are in it (`Exchange.effects`), and the others are done again
saved   neither: all go back to the last checkpoint
"""


class StrategyLog(Protocol):
    """Where a strategy tells what it did."""

    def exchanged(
        self,
        *,
        bytes_received: int = 0,
        staleness: dict[int, int] | None = None,
        disagreement: float | None = None,
    ) -> None:
        """This worker has exchanged once more. `disagreement` is its distance to what all have in common, relative."""

    def contest(self, met: Contested) -> None:
        """This worker's model has met another one."""

    def switched(self, step: int, strategy: str) -> None:
        """From `step` on the workers keep in agreement in another way."""

    def count_bytes(self, counter: Callable[[], int]) -> None:
        """From now on, what this counter says was sent counts, too."""

    def outside(self) -> AbstractContextManager[None]:
        """What is sent while this lasts is for evaluating or saving, and does not count as the strategy's."""

    def wants_disagreement(self) -> bool:
        """Whether it is time to look how far the workers are apart, which costs a pass over all parameters."""


class NoLog:
    """A `StrategyLog` that nobody reads."""

    def exchanged(
        self,
        *,
        bytes_received: int = 0,
        staleness: dict[int, int] | None = None,
        disagreement: float | None = None,
    ) -> None:
        """Nothing."""

    def contest(self, met: Contested) -> None:
        """Nothing."""

    def switched(self, step: int, strategy: str) -> None:
        """Nothing."""

    def count_bytes(self, counter: Callable[[], int]) -> None:
        """Nothing."""

    def outside(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def wants_disagreement(self) -> bool:
        """No."""
        return False


@dataclass(frozen=True)
class Replica:
    """One worker's copy of what is trained, its line to the others, and what else a strategy may need."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    gradients: GradientBuffer
    collective: Collective
    seed: int = 0
    step: int = 0
    """How many steps had been done when this replica was made: more than none in a run that is resumed."""
    steps_per_epoch: int | None = None
    """None if the run's length is not known in advance (a loop of the user's own)."""
    clip_norm: float | None = None
    score: Callable[[], tuple[float, float]] | None = None
    """The model's (loss, accuracy) on this worker's part of the data that is held out for tournaments."""
    open_servers: Callable[[], ParameterServers] | None = None
    """The line to the run's parameter servers; the run closes it."""
    log: StrategyLog = field(default_factory=NoLog)


class Exchange(Protocol):
    """What a strategy does, and when.

    The riders of the gradient buffer are numbers on which all workers must agree (the loss, a wish to stop). They
    travel with whatever the strategy exchanges; where nothing is exchanged in a step, they wait for the next. Workers
    of an asynchronous strategy reach a step at different times, so nothing can travel with it: they are called together
    when there is something to agree on (`workers/meeting.py`).
    """

    @property
    def is_asynchronous(self) -> bool:
        """Whether each worker goes at its own pace."""

    @property
    def recovery(self) -> Recovery:
        """How the others go on when a worker is lost; see `Recovery`."""

    def effects(self) -> dict[int, int] | None:
        """Of which worker, by rank, how many steps are in what the workers hold, as far as this one knows.

        Asked where recovery is "merge". None if it cannot be said this time: then all go back to what is saved.
        """

    def merge(self, survivors: Collective) -> None:
        """Somebody is lost. Bring what the survivors hold together, so that each of them can go on from there.

        All of them call this, with a collective of theirs alone. If it raises, this replica is as it was before.
        """

    def begin(self) -> None:
        """Before the first step: bring all replicas to where the strategy wants them."""

    def before_forward(self) -> None:
        """Before a step's forward pass."""

    def before_backward(self, weight: float) -> None:
        """Before the backward pass that completes the gradients: they may be exchanged as they become complete.

        A loop of the user's own need not say so.
        """

    def before_update(self, weight: float) -> bool:
        """The local gradients are complete; `weight` is this worker's part of the step's samples.

        Afterwards the gradient buffer holds what is to be applied. True if the riders now hold the weighted sum over
        all workers.
        """

    def update(self) -> None:
        """Apply what the gradient buffer holds. Left out if the loss is not finite."""

    def after_update(self, weight: float) -> bool:
        """The step is done. True if the riders now hold the weighted sum over all workers."""

    def may_go_on(self, limit_s: float) -> bool:
        """Whether this worker may begin its next step; asked, for asynchronous strategies, until it may."""

    def must_meet(self, step: int) -> bool:
        """Whether all workers must be at the same place when `step` steps are done."""

    def shared(self) -> AbstractContextManager[None]:
        """While this lasts, every replica holds what the workers have in common: what is evaluated and saved."""

    def settle(self) -> None:
        """Give every replica what the workers have in common, for good: another strategy takes over."""

    def private_state(self) -> dict[str, Any] | None:
        """What a checkpoint must hold for this worker alone, beside the model and optimiser of the first; or None.

        Asked inside `shared`.
        """

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take up a state from `private_state`."""

    def carried_state(self) -> dict[str, Any] | None:
        """What of the private state this worker takes along when it goes on with others."""

    def newcomers_state(self) -> dict[str, Any] | None:
        """What of it a worker needs that takes this one's replica."""

    def close(self) -> None:
        """Release what this exchange holds, and let go of memory that others see. Nobody is waited for."""


class PlainExchange:
    """An `Exchange` that exchanges nothing: each worker trains by itself. Strategies say what they do differently."""

    is_asynchronous = False
    recovery: Recovery = "saved"

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def begin(self) -> None:
        """Everybody takes the first worker's parameters and buffers."""
        adopt_first(self.replica)

    def before_forward(self) -> None:
        """Nothing."""

    def before_backward(self, weight: float) -> None:
        """Nothing."""
        del weight

    def before_update(self, weight: float) -> bool:
        """Nothing: this worker applies its own gradients."""
        del weight
        return False

    def update(self) -> None:
        """This worker's own optimiser steps."""
        self.replica.optimizer.step()

    def after_update(self, weight: float) -> bool:
        """Nothing."""
        del weight
        return False

    def may_go_on(self, limit_s: float) -> bool:
        """At once."""
        del limit_s
        return True

    def must_meet(self, step: int) -> bool:
        """Never."""
        del step
        return False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """What is settled is shared."""
        self.settle()
        yield

    def settle(self) -> None:
        """Nothing: the replicas are equal."""

    def private_state(self) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Nothing."""
        del state

    def effects(self) -> dict[int, int] | None:
        """Not known."""
        return None

    def merge(self, survivors: Collective) -> None:
        """Not asked for, unless recovery is "merge"."""
        raise NotImplementedError(f"{type(self).__name__} cannot merge what survivors hold")

    def carried_state(self) -> dict[str, Any] | None:
        """All of it."""
        return self.private_state()

    def newcomers_state(self) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def close(self) -> None:
        """Nothing is held."""


def adopt_first(replica: Replica) -> None:
    """Give every replica the first worker's parameters and buffers."""
    for tensor in [*replica.model.parameters(), *replica.model.buffers()]:
        replica.collective.broadcast_(tensor.detach())
