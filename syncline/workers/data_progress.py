"""One worker's progress through the samples of a run.

Here: `DataProgress`: the position, the assignment of the current View, and the ledger entries for the samples that this
worker has used. Not here: the order of the samples (`data/order.py`), and from where the members of a new View continue
(`state_sync.py`).

In a user's own loop the survivors of a failure complete the step in flight with the shares that they have: the
assignment of the last View stays in force until the first exchange of the new one. `holders` says which worker has
which of its shares; those of a worker that is gone are requeued afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, replace

from syncline.data.assignment import Assignment, Position, Range, total
from syncline.data.ledger import Closed, Line, Opened, Tally, Used
from syncline.data.order import SampleOrder, Share
from syncline.workers.session import Session

_REPORT_EVERY_S = 1.0
"""How often a worker writes to the ledger which samples it has used."""


class DataProgress:
    """Progress through `order`, up to epoch `epochs` (None: the user's loop decides when to end)."""

    def __init__(self, session: Session, order: SampleOrder, *, epochs: int | None) -> None:
        self._session, self.order, self.epochs = session, order, epochs
        self.position = self.start = Position()
        """Where this worker is, and where the current View started."""
        self.assignment = self.assignment_from(self.position)
        self.rank: int | None = None
        """Which share of the assignment this worker computes; None if it has none."""
        self.holders: tuple[int, ...] = ()
        """The worker_id that has each share of the assignment, by the assignment's ranks."""
        self.generation = 0
        """Counts assignments: batches that were fetched for an earlier one are outdated."""
        self.inherited_at: int | None = None
        """While the assignment is the last View's: the step up to which its state has the samples of all holders."""
        self.updated_at = 0
        """Where the last update, or the state that this worker has loaded, has left the run: its number of steps."""
        self.has_exchanged = False
        """Whether the members have made an update with the assignment that they inherited."""
        self._tally, self._skipped, self._reported_at = Tally(), Tally(), time.monotonic()
        self.view = 0
        """The View that this worker has reported to the ledger last."""
        self._is_new_data = False

    def assignment_from(self, position: Position, requeued: tuple[Range, ...] = ()) -> Assignment:
        """The work of the current members from `position` on."""
        return Assignment(
            position, self._session.place.grid.shares, self.order.count, self.order.batch, self.epochs, requeued
        )

    def begin_assignment(self, assignment: Assignment) -> None:
        """Continue at the start of `assignment`, with the members of the current View."""
        self.assignment = assignment
        self.position = self.start = assignment.start
        self._divide_among(self._session.place.holders)
        self.rank = self._session.place.share  # workers of a team compute a share together, and one of them holds it
        self.inherited_at = None
        self.generation += 1

    def inherit_assignment(self, assignment: Assignment, holders: Sequence[int], *, at: int, applied: int) -> None:
        """Continue with the assignment of the last View after `at` steps; `applied` of them are in the state."""
        is_new = (assignment, tuple(holders)) != (self.assignment, self.holders)
        self.assignment, self.inherited_at = assignment, applied
        self._divide_among(holders)
        self.has_exchanged = False
        self.position = assignment.at(at)
        self.generation += is_new

    def _divide_among(self, holders: Sequence[int]) -> None:
        self.holders, worker_id = tuple(holders), self._session.worker_id
        self.rank = self.holders.index(worker_id) if worker_id in self.holders else None

    def samples_of_members(self, share: Share) -> int:
        """How many samples of the step of `share` the current members have; the holders of the rest are gone."""
        if self.inherited_at is None:
            return share.batch
        gone = [rank for rank, holder in enumerate(self.holders) if holder not in self._session.members]
        steps = (self.assignment.step_of(share.position.step, rank) for rank in gone)
        return share.batch - sum(total(step.ranges) for step in steps)

    @property
    def is_divided_anew(self) -> bool:
        """Whether what is left is to be divided among other workers than those that hold the shares now."""
        is_over = self.inherited_at is not None and self.has_exchanged
        return is_over and self.holders != tuple(self._session.members)

    def end_inheritance(self, *, opens_view: bool = True) -> None:
        """The round is over, and all members have applied their inherited shares: divide what is left among them."""
        if self.inherited_at is None:
            return
        steps, members = self.position.step, self._session.members
        applied = {
            rank: steps if holder in members else min(self.inherited_at, steps)
            for rank, holder in enumerate(self.holders)
        }
        self.report_used()
        self.begin_assignment(self.assignment.next(self._session.place.grid.shares, applied))
        if opens_view:
            self.open_view(from_checkpoint=False)

    def begin_new_data(self, position: Position) -> None:
        """Begin an epoch with other data than before `position`. The rest of its epoch is dropped."""
        epoch = position.epoch + 1 if position.cursor else position.epoch
        self.begin_assignment(self.assignment_from(replace(position, epoch=epoch, cursor=0)))
        self._is_new_data = True

    def open_view(self, *, from_checkpoint: bool) -> None:
        """Record the current View in the ledger."""
        self.view = self._session.view
        is_new_data, self._is_new_data = self._is_new_data, False
        self._add_to_ledger(
            Opened(
                view=self.view,
                members=self._session.place.holders,
                start=astuple(self.start),
                count=self.order.count,
                batch=self.order.batch,
                epochs=self.epochs,
                requeued=list(self.assignment.requeued),
                rolled_back=from_checkpoint,
                data_changed=is_new_data,
            )
        )

    def advance(self, share: Share, *, is_skipped: bool = False) -> None:
        """Record that this worker has used `share`, or that the user's loop has skipped it."""
        self.position = share.after
        if self._session.worker_id in self.holders:
            (self._skipped if is_skipped else self._tally).add(share.ranges, share.after.step)
        if time.monotonic() - self._reported_at > _REPORT_EVERY_S:
            self.report_used()

    def pass_over(self, share: Share) -> None:
        """Advance past `share`, which is in the state already: this worker repeats a step that the others have done."""
        self.position = share.after

    def is_complete(self, position: Position) -> bool:
        """Whether the run ends at `position`; samples to be made up for come first."""
        limit = self._session.plan.total_steps
        has_all_steps = bool(limit) and position.step - position.extra >= limit
        has_all_epochs = self.epochs is not None and position.epoch >= self.epochs
        return (has_all_steps or has_all_epochs) and not self.assignment.has_requeued_after(position.step)

    def remaining(self, taken: int = 0) -> Assignment:
        """The work that is left for the current members after the batches that were `taken` from here on."""
        size = self.assignment.size
        return self.assignment.next(size, dict.fromkeys(range(size), self.position.step + taken))

    def skip_to(self, position: Position) -> None:
        """Continue at `position`: the user's loop has left an epoch early. All workers do so after the same step."""
        remaining = self.remaining()
        left = [(remaining.start.epoch, remaining.start.cursor, self.order.count)] if remaining.start.cursor else []
        if self._session.rank == 0:
            self._skipped.add(left, position.step)
        self.position, self.assignment = position, replace(remaining, start=position)
        self.generation += 1

    def report_used(self) -> None:
        """Write to the ledger which samples this worker has used since the last time."""
        self._reported_at = time.monotonic()
        for tally, skipped in ((self._tally, False), (self._skipped, True)):
            if runs := tally.take():
                self._add_to_ledger(Used(self.view, self._session.worker_id, tally.steps, runs, skipped=skipped))

    def close(self, *, stopped_early: bool) -> None:
        """Complete the ledger at the end of the run."""
        self.report_used()
        if self._session.rank == 0:
            requeued = list(self.remaining().requeued)
            self._add_to_ledger(Closed(astuple(self.position), requeued, stopped_early))

    def _add_to_ledger(self, line: Line) -> None:
        if self.order.is_counted:
            self._session.add_to_ledger(line)
