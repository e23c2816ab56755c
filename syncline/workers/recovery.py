"""The rule by which the members of a new View decide from where to continue.

Here: what each member reports when it enters (`Standing`), and the pure function that all of them evaluate alike
(`plan_sync`). Not here: how state travels (`state_sync.py`), what a strategy holds (`strategies/`), and who the members
are (`coordinator/membership.py`). The three ways are those of `strategies.exchange.Recovery`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from syncline.data.assignment import Assignment, Position, Range
from syncline.strategies.exchange import Recovery


class Standing(msgspec.Struct, frozen=True):
    """What one member holds when it enters a View."""

    worker_id: int
    view: int = 0
    """The last View whose state it holds; 0 for a new worker."""
    step: int = 0
    """How many steps it has done."""
    recovery: Recovery = "saved"
    start: tuple[int, int, int, int] = (0, 0, 0, 0)
    size: int = 1
    requeued: tuple[Range, ...] = ()
    """The assignment that it was in: start, number of workers, samples to be made up for."""
    committed: dict[int, int] = {}
    """For each worker of that assignment, by rank: how many of its steps are in the state that this one holds."""
    holders: tuple[int, ...] = ()
    """The worker_id that has each share of that assignment."""
    updates: int = 0
    """How many updates its state has, in a user's own loop: there may be several in a step."""
    round_start: int = 0
    """Where its round began: the step whose batch it took first."""
    in_place: bool = False
    """Whether it is inside a user's script that continues where it is."""
    has_ended: bool = False
    """Whether that script has ended."""
    is_ahead: bool = False
    """Whether that script holds batches that it will compute with after the step in progress."""

    @classmethod
    def of(
        cls, worker_id: int, view: int, step: int, assignment: Assignment, recovery: Recovery, committed: dict[int, int]
    ) -> Standing:
        """The standing of a worker that has done `step` steps in `assignment`."""
        start = (assignment.start.epoch, assignment.start.cursor, assignment.start.step, assignment.start.extra)
        return cls(worker_id, view, step, recovery, start, assignment.size, assignment.requeued, committed)

    is_repeating: bool = False
    """Whether it repeats a round that the others have done: it has their state, but not yet their place."""

    @property
    def reached(self) -> int:
        """How far its state is; equal replicas that have reached the same hold the same."""
        return self.updates if self.in_place else self.step


class SyncPlan(NamedTuple):
    """How the members continue from live state. All fields name members by rank in the new View."""

    source: int
    """The rank that sends its state."""
    stale: tuple[int, ...]
    """The ranks that load it."""
    survivors: tuple[int, ...]
    """The ranks that hold state of the last View."""
    merges: bool
    """Whether the survivors merge their replicas first."""
    assignment: Assignment
    """The work of the new members."""
    is_inherited: bool = False
    """Whether that is the assignment of the last View: its survivors complete the round that they are in."""


def plan_sync(
    standings: Sequence[Standing], *, count: int, batch: int, epochs: int | None, shares: int | None = None
) -> SyncPlan | None:
    """What follows from the standings of all members, in the order of their ranks. None: load the newest checkpoint.

    `shares` is how many shares a step has from now on; by default, one for each member.
    """
    latest = max(s.view for s in standings)
    # The state of a member that missed a View is older than everyone else's: it counts as a new worker.
    survivors = tuple(rank for rank, s in enumerate(standings) if s.view == latest and latest > 0)
    ways = {standings[rank].recovery for rank in survivors}
    if ways not in ({"equal"}, {"merge"}) or len({standings[rank].in_place for rank in survivors}) > 1:
        return None
    merges = ways == {"merge"}
    source = max(survivors, key=lambda rank: _advance(standings[rank], rank))
    best = standings[source]
    # A user's loop may leave an epoch early: some survivors may have skipped the rest, others not yet.
    assignments = {(s.start, s.size, s.requeued) for s in (standings[rank] for rank in survivors)}
    if len(assignments) > 1 and (merges or not best.in_place):
        return None
    before = Assignment(Position(*best.start), best.size, count, batch, epochs, best.requeued)
    if merges:
        stale = tuple(rank for rank in range(len(standings)) if rank not in survivors)
        committed = {
            worker: max(standings[rank].committed.get(worker, before.start.step) for rank in survivors)
            for worker in range(best.size)
        }
    else:
        # A synchronous step completes on no worker before all have contributed to it: the most advanced survivor
        # holds the same number of steps of every worker, failed ones included.
        stale = tuple(rank for rank, s in enumerate(standings) if rank not in survivors or s.reached != best.reached)
        if best.in_place:
            return SyncPlan(source, stale, survivors, merges, before, is_inherited=True)
        committed = dict.fromkeys(range(best.size), best.step)
    return SyncPlan(source, stale, survivors, merges, before.next(shares or len(standings), committed))


def _advance(standing: Standing, rank: int) -> tuple[int, bool, int, int]:
    """The source is the survivor with the largest of these."""
    return standing.reached, not standing.is_repeating, standing.round_start, -rank


def encode(standing: Standing) -> bytes:
    return msgspec.msgpack.encode(standing)


def decode(data: bytes) -> Standing:
    return msgspec.msgpack.decode(data, type=Standing)
