"""Two levels: one strategy inside a group of workers, another between the groups, each of which acts as one worker.

A group is a host, or, where there is only one host, some of its workers. Its rank 0, the leader, exchanges with the
other leaders, and broadcasts the result inside its group. With W_g the group's part of the samples, worker k's weight
inside is n_k / N / W_g, and the group's weight across is W_g, so that every sample counts the same whatever the groups
are: a hierarchy of equals is the flat strategy.

Here: `HierarchicalAllReduce` (gradients are summed inside, then across, where they may be encoded) and
`HierarchicalLocalSGD` (a group trains together, and groups combine their updates; with Hogwild inside this is H2O's
way, Candel et al. 2015). Not here: which strategies make a hierarchy (`strategies/hierarchy.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from syncline.errors import ConfigError
from syncline.strategies.exchange import REQUESTS, Exchange, LocalExchange, Replica
from syncline.strategies.method import Method, ModelShapes, RunConditions
from syncline.strategies.methods.allreduce import exact_all_reduce
from syncline.strategies.methods.local_sgd import state_in_common
from syncline.strategies.traffic import Traffic

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Hierarchical(Method):
    """A method inside groups of workers, and another between the groups."""

    inside: Method
    across: Method
    group: int

    title = "A hierarchy"

    @property
    def is_lock_step(self) -> bool:
        return self.inside.is_lock_step and self.across.is_lock_step

    @property
    def is_repeatable(self) -> bool:
        return self.inside.is_repeatable and self.across.is_repeatable

    @property
    def steps(self) -> int:
        return self.across.steps

    def check_run(self, run: RunConditions) -> None:
        if run.workers == 1:
            return
        self.inside.check_run(dataclasses.replace(run, hosts=1))
        if run.hosts > 1:
            return
        workers, group = run.workers, self.group
        if workers < 2 * group:
            smaller = f", or group to {workers // 2}" if workers >= 4 else ""
            problem = f"needs two groups of {group} workers on this one host, but --workers is {workers}"
            fix = f"Set --workers to {2 * group} or more{smaller}."
        elif workers % group:
            fitting = [g for g in range(2, workers // 2 + 1) if workers % g == 0]
            other = f", or group to {min(fitting, key=lambda g: abs(g - group))}" if fitting else ""
            problem = f"cannot divide {workers} workers into groups of {group}"
            fix = f"Set --workers to {workers // group * group} or {(workers // group + 1) * group}{other}."
        else:
            return
        raise ConfigError(
            f"A hierarchy {problem}. {fix}", code="groups-do-not-fit", workers=workers, group=group, fix=fix
        )

    def on_hosts(self, hosts: int, workers: int) -> Hierarchical:
        return dataclasses.replace(self, group=max(1, workers // hosts)) if hosts > 1 else self

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float | None:
        """A group's leader sends for it, and broadcasts the result inside, unless that is in shared memory."""
        group = min(self.group, workers)
        inside = self.inside.bytes_per_step(model, group, optimizer_slots)
        across = self.across.bytes_per_step(model, max(1, workers // group), optimizer_slots)
        if inside is None or across is None or workers == 1:
            return 0.0 if workers == 1 else None
        broadcast = 0 if self.inside.needs_shared_memory else model.exact_bytes
        return inside + (across + broadcast / self.across.steps) / group

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...] | None:
        """That of both levels; only a group's leader exchanges across, and the group waits for it."""
        group = min(self.group, workers)
        groups = max(1, workers // group)
        inside = self.inside.traffic(model, group, optimizer_slots)
        across = self.across.traffic(model, groups, optimizer_slots)
        if inside is None or across is None or workers == 1:
            return () if workers == 1 else None
        inner = [dataclasses.replace(each, members=each.members or group, place="inside-host") for each in inside]
        outer = [dataclasses.replace(each, members=each.members or groups, place="across-hosts") for each in across]
        found = [*inner, *(dataclasses.replace(each, senders=each.senders / group) for each in outer)]
        if not self.inside.needs_shared_memory:
            sent, every = float(model.exact_bytes), self.across.steps
            found.append(
                Traffic(
                    pattern="broadcast",
                    sent_bytes=sent,
                    every=every,
                    members=group,
                    place="inside-host",
                    senders=1 / group,
                )
            )
        return tuple(found)

    def memory_copies(self, optimizer_slots: int = 0) -> float:
        return self.inside.memory_copies(optimizer_slots) + self.across.memory_copies(optimizer_slots)

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        inside = self.inside.explain(model, self.group)
        across = self.across.explain(model, max(2, workers // self.group))
        return [
            f"Workers form groups: those of a host or, on a single host, {self.group} each.",
            "Inside a group:",
            *(f"  {line}" for line in inside),
            "Across groups, each of which acts as one worker and exchanges through its leader:",
            *(f"  {line}" for line in across),
        ]

    def exchange(self, replica: Replica) -> Exchange:
        if replica.collective.size == 1:
            return exact_all_reduce(replica)
        groups = _Groups(replica, self.group)
        return (
            HierarchicalAllReduce(replica, self, groups)
            if self.across.is_lock_step
            else HierarchicalLocalSGD(replica, self, groups)
        )


class _Groups:
    """This worker's group, and, for its leader, the other leaders."""

    def __init__(self, replica: Replica, group: int) -> None:
        collective = replica.collective
        hosts = collective.hosts()
        self.inside = collective.split(hosts[collective.rank] if any(hosts) else collective.rank // group)
        self.is_leader = self.inside.rank == 0
        leaders = collective.split(0 if self.is_leader else 1)
        self.across = leaders if self.is_leader else None
        self.part = self.inside.size / collective.size
        """The group's part of the workers, hence of the samples, but for the remainder of a division."""
        for each in (self.inside, self.across):
            if each is not None:
                replica.log.count_bytes(lambda each=each: each.bytes_sent)  # type: ignore[misc]  # bound now, not later

    def exchanges(self, replica: Replica, method: Hierarchical) -> tuple[LocalExchange, LocalExchange | None]:
        """What this worker does inside its group and, if it is the leader, across."""
        inside = method.inside.exchange(dataclasses.replace(replica, collective=self.inside))
        if self.across is None:
            return cast(LocalExchange, inside), None
        across = method.across.exchange(dataclasses.replace(replica, collective=self.across))
        return cast(LocalExchange, inside), cast(LocalExchange, across)


class HierarchicalAllReduce(LocalExchange):
    """An `Exchange`: gradients are summed inside the groups, the sums across them."""

    def __init__(self, replica: Replica, method: Hierarchical, groups: _Groups) -> None:
        super().__init__(replica, method)
        self._groups = groups
        self._inside, self._across = groups.exchanges(replica, method)

    def begin(self) -> None:
        super().begin()
        self._inside.begin()

    def before_forward(self) -> None:
        self._inside.before_forward()

    def before_update(self, weight: float) -> bool:
        self._inside.before_update(weight)
        if self._across is not None:
            self._across.before_update(1.0)
        for flat in self.replica.gradients.flats:
            self._groups.inside.broadcast_(flat)
        return True

    def update(self) -> None:
        self._inside.update()

    def close(self) -> None:
        _close_both(self._inside, self._across)

    def private_state(self) -> dict[str, Any] | None:
        """The residuals of both levels."""
        return _both(self._inside, self._across)

    def load_private_state(self, state: dict[str, Any]) -> None:
        _load_both(self._inside, self._across, state)


class HierarchicalLocalSGD(LocalExchange):
    """An `Exchange`: each group trains by itself, and the groups combine what they have changed every n steps."""

    def __init__(self, replica: Replica, method: Hierarchical, groups: _Groups) -> None:
        super().__init__(replica, method)
        self._groups, self._steps = groups, method.across.steps
        self._inside, self._across = groups.exchanges(replica, method)
        self._restarts = not method.across.has_separate_models
        # Where the leaders' optimizers change, too, those of a group that steps as one must follow.
        self._spreads_optimizer = method.across.averages_optimizer and not method.inside.needs_shared_memory
        self._since = 0 if self._restarts else replica.step % self._steps
        self._round = replica.step // self._steps
        self._has_agreed_inside = False
        self._has_spread = replica.step == 0

    def begin(self) -> None:
        """Broadcast rank 0's parameters, then begin on both levels."""
        super().begin()
        self._inside.begin()
        if self._across is not None:
            self._across.begin()
        self._groups.inside.barrier()

    def before_forward(self) -> None:
        self._spread_saved()
        self._inside.before_forward()

    def before_backward(self, weight: float) -> None:
        self._inside.before_backward(weight / self._groups.part)

    def before_update(self, weight: float) -> bool:
        """As inside the group; its requests wait for the next exchange across."""
        self._has_agreed_inside = self._inside.before_update(weight / self._groups.part)
        if self._has_agreed_inside:
            piggybacked = self.replica.gradients.piggybacked
            self._group_piggybacked = piggybacked.clone()
            piggybacked[REQUESTS] = 0.0
        return self._has_agreed_inside

    def update(self) -> None:
        self._inside.update()

    def after_update(self, weight: float) -> bool:
        """As inside the group, and every n steps across the groups."""
        piggybacked, groups = self.replica.gradients.piggybacked, self._groups
        if self._has_agreed_inside:
            piggybacked.copy_(self._group_piggybacked)
        has_agreed = self._inside.after_update(weight / groups.part) or self._has_agreed_inside
        self._since += 1
        if self._since < self._steps:
            if has_agreed:
                piggybacked[REQUESTS] = 0.0
            return has_agreed
        self._since = 0
        if not has_agreed:
            groups.inside.all_reduce_(piggybacked, weight / groups.part)
        if groups.across is not None:
            groups.across.all_reduce_(piggybacked, groups.part)
        groups.inside.broadcast_(piggybacked)
        self._combine()
        return True

    @contextmanager
    def shared(self) -> Iterator[None]:
        self._spread_saved()
        self._settle_across()
        with self._across.shared() if self._across is not None else nullcontext():
            self._spread()
            yield
            self._groups.inside.barrier()
        self._spread()

    def settle(self) -> None:
        self._settle_across()
        if self._across is not None:
            self._across.settle()
        self._spread()
        self._inside.settle()

    def close(self) -> None:
        _close_both(self._inside, self._across)

    def private_state(self) -> dict[str, Any] | None:
        """Both levels', and the optimizer: the same on all workers of a group perhaps, but not on those of others."""
        return {"optimizer": self.replica.optimizer.state_dict(), **_both(self._inside, self._across)}

    def load_private_state(self, state: dict[str, Any]) -> None:
        self.replica.optimizer.load_state_dict(state["optimizer"])
        _load_both(self._inside, self._across, state)

    def _spread_saved(self) -> None:
        """Broadcast what the leader has loaded from a checkpoint, in the first step.

        Not when it is loaded: a worker that is new since the checkpoint has nothing to load.
        """
        if not self._has_spread:
            self._has_spread = True
            self._spread()

    def _settle_across(self) -> None:
        """Bring the whole group to one state and, where groups combine what they have changed, do that now."""
        self._gather_inside()
        if self._restarts and self._since:
            self._since = 0
            self._combine()

    def _combine(self) -> None:
        self._gather_inside()
        if self._across is not None:
            self._across.combine(self._groups.part, self._round)
        self._round += 1
        self._spread()
        if self._spreads_optimizer:
            for value in state_in_common(self.replica.optimizer, self._groups.inside):
                self._groups.inside.broadcast_(value)

    def _gather_inside(self) -> None:
        """Bring the whole group to one state."""
        self._inside.agree()
        self._groups.inside.barrier()

    def _spread(self) -> None:
        self._inside.take_from_leader()


def _both(inside: Exchange, across: Exchange | None) -> dict[str, Any]:
    return {"inside": inside.private_state(), "across": across.private_state() if across is not None else None}


def _load_both(inside: Exchange, across: Exchange | None, state: dict[str, Any]) -> None:
    if state["inside"] is not None:
        inside.load_private_state(state["inside"])
    if across is not None and state["across"] is not None:
        across.load_private_state(state["across"])


def _close_both(inside: Exchange, across: Exchange | None) -> None:
    if across is not None:
        across.close()
    inside.close()
