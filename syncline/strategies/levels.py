"""Two levels: one strategy inside a group of workers, another between the groups, each of which acts as one worker.

A group is a host, or, where there is only one host, some of its workers. Its first worker, the leader, speaks for it;
what the leaders agree on, each passes on inside its group. With W_g the group's part of the samples, worker k's weight
inside is n_k / N / W_g, and the group's weight across is W_g, so that every sample counts the same whatever the groups
are: a hierarchy of equals is the flat strategy.

Here: `SumInLevels` (gradients summed inside, then across: a hierarchical all-reduce, which may encode only what crosses
hosts) and `UpdatesAcross` (a group trains together, and groups combine what they have changed; with Hogwild inside this
is H2O's way, Candel et al. 2015).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from syncline.strategies.combine_updates import CombineUpdates, state_in_common
from syncline.strategies.exchange import Exchange, PlainExchange, Replica
from syncline.strategies.flat import FlatParameters
from syncline.strategies.gradients import WISHES
from syncline.strategies.mix_neighbours import MixNeighbours
from syncline.strategies.share_memory import ShareMemory
from syncline.strategies.strategy import Strategy
from syncline.strategies.sum_gradients import SumGradients
from syncline.strategies.what import Gradients, Updates
from syncline.strategies.when import Every
from syncline.strategies.whom import Memory, Neighbours

__all__ = ["SumInLevels", "UpdatesAcross", "in_levels"]


def in_levels(replica: Replica, inside: Strategy, across: Strategy, group: int) -> Exchange:
    """The exchange for a hierarchy whose groups are the hosts or, on one host, have `group` workers each."""
    groups = _Groups(replica, group)
    if isinstance(across.what, Gradients):
        return SumInLevels(replica, groups, inside, across)
    return UpdatesAcross(replica, groups, inside, across)


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


class SumInLevels(PlainExchange):
    """An `Exchange`: gradients are summed inside the groups, the sums across them."""

    def __init__(self, replica: Replica, groups: _Groups, inside: Strategy, across: Strategy) -> None:
        super().__init__(replica)
        self._groups = groups
        self._inside = SumGradients(dataclasses.replace(replica, collective=groups.inside), inside.how)
        self._across = (
            SumGradients(dataclasses.replace(replica, collective=groups.across), across.how) if groups.across else None
        )

    def before_update(self, weight: float) -> bool:
        """Inside, across, and back."""
        self._inside.before_update(weight)
        if self._across is not None:
            self._across.before_update(1.0)
        for flat in self.replica.gradients.flats:
            self._groups.inside.broadcast_(flat)
        return True

    def private_state(self) -> dict[str, Any] | None:
        """What could not be sent yet on either level."""
        return _both(self._inside, self._across)

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        _load_both(self._inside, self._across, state)


class UpdatesAcross(PlainExchange):
    """An `Exchange`: the groups train each by itself, and combine what they have changed every n steps."""

    def __init__(self, replica: Replica, groups: _Groups, inside: Strategy, across: Strategy) -> None:
        super().__init__(replica)
        assert isinstance(across.when, Every), "checked by Hierarchy"
        assert isinstance(across.what, Updates), "checked by Hierarchy"
        self._groups, self._steps = groups, across.when.steps
        self._flat = FlatParameters(replica.gradients.parameters, what="a hierarchy")
        self._inside = _inside_exchange(dataclasses.replace(replica, collective=groups.inside), inside)
        self._across: CombineUpdates | MixNeighbours | None = None
        self._restarts = not isinstance(across.whom, Neighbours)
        # Where the leaders' optimisers change, too, those of a group that steps as one must follow.
        self._spreads_optimizer = across.what.optimizer_state and not isinstance(self._inside, ShareMemory)
        if groups.across is not None:
            among_leaders = dataclasses.replace(replica, collective=groups.across)
            self._across = (
                MixNeighbours(among_leaders, across.whom.topology, self._steps)
                if isinstance(across.whom, Neighbours)
                else CombineUpdates(among_leaders, across.what, self._steps, across.how)
            )
        self._since = 0 if self._restarts else replica.step % self._steps
        self._round = replica.step // self._steps
        self._has_agreed_inside = False
        self._has_spread = replica.step == 0

    def begin(self) -> None:
        """Everybody takes the first worker's parameters, then each level gets ready."""
        super().begin()
        self._inside.begin()
        if self._across is not None:
            self._across.begin()
        self._groups.inside.barrier()

    def before_forward(self) -> None:
        """As inside the group."""
        self._spread_saved()
        self._inside.before_forward()

    def before_backward(self, weight: float) -> None:
        """As inside the group."""
        self._inside.before_backward(weight / self._groups.part)

    def before_update(self, weight: float) -> bool:
        """As inside the group; its wishes wait until all groups can hear them."""
        self._has_agreed_inside = self._inside.before_update(weight / self._groups.part)
        if self._has_agreed_inside:
            riders = self.replica.gradients.riders
            self._group_riders = riders.clone()
            riders[WISHES] = 0.0
        return self._has_agreed_inside

    def update(self) -> None:
        """As inside the group."""
        self._inside.update()

    def after_update(self, weight: float) -> bool:
        """As inside the group, and every n steps across the groups."""
        riders, groups = self.replica.gradients.riders, self._groups
        if self._has_agreed_inside:
            riders.copy_(self._group_riders)
        has_agreed = self._inside.after_update(weight / groups.part) or self._has_agreed_inside
        self._since += 1
        if self._since < self._steps:
            if has_agreed:
                riders[WISHES] = 0.0
            return has_agreed
        self._since = 0
        if not has_agreed:
            groups.inside.sum_(riders, weight / groups.part)
        if groups.across is not None:
            groups.across.sum_(riders, groups.part)
        groups.inside.broadcast_(riders)
        self._combine()
        return True

    @contextmanager
    def shared(self) -> Iterator[None]:
        """What the groups have in common."""
        self._spread_saved()
        self._settle_across()
        with self._across.shared() if self._across is not None else nullcontext():
            self._spread()
            yield
            self._groups.inside.barrier()
        self._spread()

    def settle(self) -> None:
        """The same, for good."""
        self._settle_across()
        if self._across is not None:
            self._across.settle()
        self._spread()
        self._inside.settle()

    def private_state(self) -> dict[str, Any] | None:
        """Both levels', and the optimiser: the same on all workers of a group perhaps, but not on those of others."""
        return {"optimizer": self.replica.optimizer.state_dict(), **_both(self._inside, self._across)}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        self.replica.optimizer.load_state_dict(state["optimizer"])
        _load_both(self._inside, self._across, state)

    def _spread_saved(self) -> None:
        """What the leader has taken up from a checkpoint, the first time that everybody is here.

        Not when it is loaded: a worker that was not there when it was saved has nothing to load.
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
        if isinstance(self._across, CombineUpdates):
            self._across.combine(self._groups.part)
        elif self._across is not None:
            self._across.mix(self._round)
        self._round += 1
        self._spread()
        if self._spreads_optimizer:
            for value in state_in_common(self.replica.optimizer, self._groups.inside):
                self._groups.inside.broadcast_(value)

    def _gather_inside(self) -> None:
        """Bring the whole group to one state."""
        if isinstance(self._inside, CombineUpdates):
            self._inside.settle()
        self._groups.inside.barrier()

    def _spread(self) -> None:
        """Give the whole group what its leader has."""
        if isinstance(self._inside, ShareMemory):
            self._groups.inside.barrier()  # it lies where all see it
            return
        flat = self._flat.read()
        self._groups.inside.broadcast_(flat)
        self._flat.write(flat)
        if isinstance(self._inside, CombineUpdates):
            self._inside.start_from_here()


def _inside_exchange(replica: Replica, strategy: Strategy) -> SumGradients | ShareMemory | CombineUpdates:
    if isinstance(strategy.whom, Memory):
        return ShareMemory(replica)
    if isinstance(strategy.what, Updates):
        assert isinstance(strategy.when, Every), "checked by Hierarchy"
        return CombineUpdates(replica, strategy.what, strategy.when.steps, strategy.how)
    return SumGradients(replica, strategy.how)


def _both(inside: Exchange, across: Exchange | None) -> dict[str, Any]:
    return {"inside": inside.private_state(), "across": across.private_state() if across is not None else None}


def _load_both(inside: Exchange, across: Exchange | None, state: dict[str, Any]) -> None:
    if state["inside"] is not None:
        inside.load_private_state(state["inside"])
    if across is not None and state["across"] is not None:
        across.load_private_state(state["across"])
