"""The seam between a training step and a strategy: what a strategy does at the named moments of a step.

Here: the `Exchange` protocol; `LocalExchange`, which exchanges nothing and which all exchanges build on; `Replica`, the
worker's copy that they work on. Not here: the exchanges themselves (`methods/`, one file each) and who calls the
moments (`workers/update.py`, for the built-in loop and for `optimizer.step()` alike).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from syncline.strategies.lazy import flat
from syncline.strategies.method import Method, Recovery

if TYPE_CHECKING:
    import torch

    from syncline.comms.collective import Collective
    from syncline.comms.parameter_server.client import ParameterServers
    from syncline.strategies.brackets import Contested
    from syncline.strategies.gradients import GradientBuffer

__all__ = [
    "REQUESTS",
    "Exchange",
    "HierarchyLevel",
    "LocalExchange",
    "NoLog",
    "Recovery",
    "Replica",
    "StrategyLog",
    "broadcast_first",
]


REQUESTS = slice(5, None)
"""Which piggybacked values are requests, on which all workers must act at the same step; the first are measurements."""


class StrategyLog(Protocol):
    """Where a strategy reports what it did."""

    def exchanged(
        self,
        *,
        bytes_received: int = 0,
        staleness: dict[int, int] | None = None,
        disagreement: float | None = None,
    ) -> None:
        """One more exchange. `disagreement` is the relative distance of this worker's model to the shared one."""

    def read_old(self, steps: int) -> None:
        """One more step with values of other workers that were so many steps old."""

    def contest(self, met: Contested) -> None:
        """A tournament between this worker's model and another."""

    def switched(self, step: int, strategy: str) -> None:
        """From `step` on the workers use another strategy."""

    def count_bytes(self, counter: Callable[[], int]) -> None:
        """Add a counter of bytes sent."""

    def outside(self) -> AbstractContextManager[None]:
        """A context whose traffic is for evaluating or saving, and does not count as the strategy's."""

    def wants_disagreement(self) -> bool:
        """Whether to measure the disagreement now, which costs a pass over all parameters."""


class NoLog:
    """A `StrategyLog` that discards everything."""

    def exchanged(
        self,
        *,
        bytes_received: int = 0,
        staleness: dict[int, int] | None = None,
        disagreement: float | None = None,
    ) -> None: ...

    def read_old(self, steps: int) -> None: ...

    def contest(self, met: Contested) -> None: ...

    def switched(self, step: int, strategy: str) -> None: ...

    def count_bytes(self, counter: Callable[[], int]) -> None: ...

    def outside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wants_disagreement(self) -> bool:
        return False


@dataclass(frozen=True)
class Replica:
    """One worker's copy of the model and optimizer, its collective, and what else a strategy may need."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    gradients: GradientBuffer
    collective: Collective
    seed: int = 0
    step: int = 0
    """How many steps were done before this replica was made: more than 0 in a resumed run."""
    steps_per_epoch: int | None = None
    """None if the run's length is not known in advance (a user's own loop)."""
    clip_norm: float | None = None
    score: Callable[[], tuple[float, float]] | None = None
    """The model's (loss, accuracy) on this worker's part of the data that is held out for tournaments."""
    open_servers: Callable[[], ParameterServers] | None = None
    """Connects to the run's parameter servers; the run closes the connection."""
    log: StrategyLog = field(default_factory=NoLog)
    is_settled: bool = False
    """Whether all workers hold the same parameters and buffers already, so that none are broadcast."""
    undivided: Callable[[], AbstractContextManager[torch.optim.Optimizer]] | None = None
    """A context with the whole optimizer, where `optimizer` stands for several that each have a part of it."""

    def whole_optimizer(self) -> AbstractContextManager[torch.optim.Optimizer]:
        """A context in which the optimizer has whole parameters and what it remembers of them."""
        return nullcontext(self.optimizer) if self.undivided is None else self.undivided()


class LoopUpdate(Protocol):
    """The moments around an update in a user's own loop, for layouts that divide it among the workers."""

    def begin_update(self) -> None:
        """Before an update in a user's own loop: from here on it counts. If it raises, nothing has changed."""

    def end_update(self) -> None:
        """After an update in a user's own loop, which counts, even if this raises `PeerFailed`."""

    @property
    def is_complete(self) -> bool:
        """Whether what this worker holds has all of the last update; a failed worker may have had a part of it."""

    def finish_updates(self, survivors: Collective) -> None:
        """A worker has failed: make its part of an update that counts, so that the survivors' replicas are equal.

        All survivors call this, with a collective of their own, where recovery is "equal" in a user's own loop.
        """


class Pace(Protocol):
    """Whether and how workers train at their own pace."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether each worker trains at its own pace."""

    def may_continue(self, limit_s: float) -> bool:
        """Whether this worker may begin its next step; polled, for asynchronous strategies, until it may."""

    def must_meet(self, step: int) -> bool:
        """Whether all workers must meet when `step` steps are done."""

    @property
    def independent(self) -> Collective:
        """The workers that train at their own pace, for asynchronous strategies: they meet."""

    def decide(self, decision: Callable[[], int]) -> int:
        """What `decision` returns, on all workers that train as one: one of them, which is independent, calls it."""


class PrivateState(Protocol):
    """What each worker holds for itself, beside the model and the optimizer."""

    def private_state(self) -> dict[str, Any] | None:
        """What a checkpoint must hold for this worker alone, beside rank 0's model and optimizer; or None.

        Called inside `shared`.
        """

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Load what an earlier `private_state` returned."""

    def carried_state(self) -> dict[str, Any] | None:
        """The part of the private state that this worker keeps in the next View."""

    def replacement_state(self) -> dict[str, Any] | None:
        """The part of it that a replacement needs which copies this worker's replica."""


class Exchange(LoopUpdate, Pace, PrivateState, Protocol):
    """What a strategy does, and when.

    The piggybacked values of the gradient buffer are what all workers must agree on (the loss, a request to stop). They
    travel with whatever the strategy exchanges; where nothing is exchanged in a step, they wait for the next. Workers
    of an asynchronous strategy reach a step at different times, so nothing can travel with it: they are called together
    when there is something to agree on (`workers/meeting.py`).
    """

    @property
    def recovery(self) -> Recovery:
        """How the survivors continue when a worker fails; see `Recovery`."""

    @property
    def holds_state(self) -> bool:
        """Whether the others may continue from what this worker holds when a worker fails."""

    def committed_steps(self) -> dict[int, int] | None:
        """By rank, how many steps of each worker are in what the workers hold, as far as this one knows.

        Called where recovery is "merge". None if it is unknown this time: then all go back to the last checkpoint.
        """

    def merge(self, survivors: Collective) -> None:
        """A worker has failed: combine what the survivors hold, so that each of them can continue from there.

        All survivors call this, with a collective of their own. If it raises, this replica is as it was before.
        """

    def begin(self) -> None:
        """Before the first step: bring all replicas to where the strategy wants them."""

    def before_forward(self) -> None:
        """Before a step's forward pass."""

    def before_backward(self, weight: float) -> None:
        """Before the backward pass that completes the gradients: they may be exchanged as they become complete.

        A user's own loop does not call it.
        """

    def before_update(self, weight: float) -> bool:
        """The local gradients are complete; `weight` is this worker's part of the step's samples.

        Afterwards the gradient buffer holds what is to be applied. True if the piggybacked values now
        hold the weighted sum over all workers.
        """

    def update(self) -> None:
        """Apply what the gradient buffer holds. Skipped if the loss is not finite."""

    def after_update(self, weight: float) -> bool:
        """The step is done. True if the piggybacked values now hold the weighted sum over all workers."""

    def shared(self) -> AbstractContextManager[None]:
        """A context in which every replica holds the shared model: what is evaluated and saved."""

    def settle(self) -> None:
        """Give every replica the shared model for good: another strategy follows."""

    def close(self) -> None:
        """Release what this exchange holds, without waiting for other workers; the parameters keep their values.

        Also called if `begin` was interrupted by a change of the membership.
        """


class HierarchyLevel:
    """What a hierarchy calls on exchanges whose method declares `fits_inside_group` or `fits_across_groups`."""

    replica: Replica

    def agree(self) -> None:
        """Inside a group: make its replicas equal now. Nothing, if they are equal after every step."""

    def take_from_leader(self) -> None:
        """Inside a group: rank 0's parameters were replaced; give them to all workers of the group."""
        parameters = flat.FlatParameters(self.replica.gradients.parameters, what="A hierarchy")
        values = parameters.read()
        self.replica.collective.broadcast_(values)
        parameters.write(values)

    def combine(self, weight: float, round: int) -> None:
        """Across groups, called by their leaders: exchange now, for the `round`-th time.

        `weight` is the group's part of the samples.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot combine what groups hold")


class WholeUpdate:
    """A `LoopUpdate` of which each worker makes all."""

    def begin_update(self) -> None: ...

    def end_update(self) -> None: ...

    @property
    def is_complete(self) -> bool:
        return True

    def finish_updates(self, survivors: Collective) -> None:
        """Nothing: each worker makes whole updates."""
        del survivors


class NoPrivateState:
    """The state of an `Exchange` whose replica is all that a worker holds."""

    def private_state(self) -> dict[str, Any] | None:
        return None

    def load_private_state(self, state: dict[str, Any]) -> None:
        del state

    def carried_state(self) -> dict[str, Any] | None:
        return self.private_state()

    def replacement_state(self) -> dict[str, Any] | None:
        return None


class LocalExchange(WholeUpdate, NoPrivateState, HierarchyLevel):
    """An `Exchange` that exchanges nothing: each worker trains by itself. Methods override what they do differently."""

    def __init__(self, replica: Replica, method: Method | None = None) -> None:
        self.replica, self.method = replica, method or Method()

    @property
    def is_asynchronous(self) -> bool:
        return self.method.is_asynchronous

    @property
    def recovery(self) -> Recovery:
        return self.method.recovery

    def begin(self) -> None:
        """Broadcast rank 0's parameters and buffers."""
        broadcast_first(self.replica)

    def before_forward(self) -> None: ...

    def before_backward(self, weight: float) -> None:
        del weight

    def before_update(self, weight: float) -> bool:
        """Nothing: this worker applies its own gradients."""
        del weight
        return False

    def update(self) -> None:
        """This worker's own optimizer steps."""
        self.replica.optimizer.step()

    def after_update(self, weight: float) -> bool:
        del weight
        return False

    def may_continue(self, limit_s: float) -> bool:
        del limit_s
        return True

    def must_meet(self, step: int) -> bool:
        del step
        return False

    @property
    def independent(self) -> Collective:
        return self.replica.collective

    def decide(self, decision: Callable[[], int]) -> int:
        """This worker trains at its own pace: it decides for itself."""
        return decision()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """What is settled is shared."""
        self.settle()
        yield

    def settle(self) -> None:
        """Nothing: the replicas are equal."""

    @property
    def holds_state(self) -> bool:
        return True

    def committed_steps(self) -> dict[int, int] | None:
        return None

    def merge(self, survivors: Collective) -> None:
        """Not asked for, unless recovery is "merge"."""
        raise NotImplementedError(f"{type(self).__name__} cannot merge what survivors hold")

    def close(self) -> None: ...


def broadcast_first(replica: Replica) -> None:
    """Broadcast rank 0's parameters and buffers."""
    if replica.is_settled:
        return
    for tensor in [*replica.model.parameters(), *replica.model.buffers()]:
        replica.collective.broadcast_(tensor.detach())
