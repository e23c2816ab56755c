"""One worker's progress through the samples of a run.

Here: `DataProgress`: the position, the assignment of the current View, and the ledger entries for the samples that this
worker has used. Not here: the order of the samples (`data/order.py`), and from where the members of a new View continue
(`state_sync.py`).
"""

from __future__ import annotations

import time
from dataclasses import astuple, replace

from syncline.data.assignment import Assignment, Position, Range
from syncline.data.ledger import Closed, Opened, Tally, Used
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
        self._tally, self._reported_at = Tally(), time.monotonic()
        self.view = 0
        """The View that this worker has reported to the ledger last."""
        self._is_new_data = False

    def assignment_from(self, position: Position, requeued: tuple[Range, ...] = ()) -> Assignment:
        """The work of the current members from `position` on."""
        return Assignment(position, self._session.plan.size, self.order.count, self.order.batch, self.epochs, requeued)

    def begin_assignment(self, assignment: Assignment) -> None:
        """Continue at the start of `assignment`, with the members of the current View."""
        self.assignment = assignment
        self.position = self.start = assignment.start

    def begin_new_data(self, position: Position) -> None:
        """Begin an epoch with other data than before `position`. The rest of its epoch is dropped."""
        epoch = position.epoch + 1 if position.cursor else position.epoch
        self.begin_assignment(self.assignment_from(replace(position, epoch=epoch, cursor=0)))
        self._is_new_data = True

    def open_view(self, *, from_checkpoint: bool) -> None:
        """Record the current View in the ledger."""
        self.view = self._session.view
        is_new_data, self._is_new_data = self._is_new_data, False
        self._session.add_to_ledger(
            Opened(
                view=self.view,
                members=self._session.members,
                start=astuple(self.start),
                count=self.order.count,
                batch=self.order.batch,
                epochs=self.epochs,
                requeued=list(self.assignment.requeued),
                rolled_back=from_checkpoint,
                data_changed=is_new_data,
            )
        )

    def advance(self, share: Share) -> None:
        """Record that this worker has used `share`."""
        self.position = share.after
        self._tally.add(share.ranges, share.after.step)
        if time.monotonic() - self._reported_at > _REPORT_EVERY_S:
            self.report_used()

    def is_complete(self, position: Position) -> bool:
        """Whether the run ends at `position`; samples to be made up for come first."""
        limit = self._session.plan.total_steps
        has_all_steps = bool(limit) and position.step - position.extra >= limit
        has_all_epochs = self.epochs is not None and position.epoch >= self.epochs
        return (has_all_steps or has_all_epochs) and not self.assignment.has_requeued_after(position.step)

    def remaining(self) -> Assignment:
        """The work that is left for the current members."""
        size = self.assignment.size
        return self.assignment.next(size, dict.fromkeys(range(size), self.position.step))

    def skip_to(self, position: Position) -> None:
        """Continue at `position`: the user's loop has left an epoch early. All workers do so after the same step."""
        remaining = self.remaining()
        self.position, self.assignment = position, replace(remaining, start=position)

    def report_used(self) -> None:
        """Write to the ledger which samples this worker has used since the last time."""
        self._reported_at = time.monotonic()
        if runs := self._tally.take():
            self._session.add_to_ledger(Used(self.view, self._session.worker_id, self._tally.steps, runs))

    def close(self, *, stopped_early: bool) -> None:
        """Complete the ledger at the end of the run."""
        self.report_used()
        if self._session.rank == 0:
            requeued = list(self.remaining().requeued)
            self._session.add_to_ledger(Closed(astuple(self.position), requeued, stopped_early))
