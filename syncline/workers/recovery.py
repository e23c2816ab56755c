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

    @classmethod
    def of(
        cls, worker_id: int, view: int, step: int, assignment: Assignment, recovery: Recovery, committed: dict[int, int]
    ) -> Standing:
        """The standing of a worker that has done `step` steps in `assignment`."""
        start = (assignment.start.epoch, assignment.start.cursor, assignment.start.step, assignment.start.extra)
        return cls(worker_id, view, step, recovery, start, assignment.size, assignment.requeued, committed)


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


def plan_sync(standings: Sequence[Standing], *, count: int, batch: int, epochs: int | None) -> SyncPlan | None:
    """What follows from the standings of all members, in the order of their ranks. None: load the newest checkpoint."""
    latest = max(s.view for s in standings)
    # The state of a member that missed a View is older than everyone else's: it counts as a new worker.
    survivors = tuple(rank for rank, s in enumerate(standings) if s.view == latest and latest > 0)
    ways = {standings[rank].recovery for rank in survivors}
    # A user's loop may leave an epoch early: some survivors may have skipped the rest, others not yet.
    assignments = {(s.start, s.size, s.requeued) for s in (standings[rank] for rank in survivors)}
    if ways not in ({"equal"}, {"merge"}) or len(assignments) > 1:
        return None
    merges = ways == {"merge"}
    source = max(survivors, key=lambda rank: (standings[rank].step, -rank))
    best = standings[source]
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
        stale = tuple(rank for rank, s in enumerate(standings) if rank not in survivors or s.step != best.step)
        committed = dict.fromkeys(range(best.size), best.step)
    return SyncPlan(source, stale, survivors, merges, before.next(len(standings), committed))


def encode(standing: Standing) -> bytes:
    return msgspec.msgpack.encode(standing)


def decode(data: bytes) -> Standing:
    return msgspec.msgpack.decode(data, type=Standing)
