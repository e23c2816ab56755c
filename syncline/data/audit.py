"""Auditing the sample ledger of a run.

Here: `audit`, which reads the whole ledger and counts for each epoch how many samples were used once, never or more
than once. Not here: the lines and their meaning (`ledger.py`); a separate module, because the driver does not import
NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from syncline.data.assignment import Position, Range
from syncline.data.ledger import Began, Closed, Line, Opened, Used, ranges_of, session_of
from syncline.data.ledger_checks import check_line
from syncline.data.ledger_file import read_ledger


@dataclass(frozen=True)
class EpochAccount:
    """The sample counts of one epoch."""

    epoch: int
    samples: int
    """Samples that are due by now."""
    committed: int
    """Samples that are in the run's state exactly once."""
    lost: int
    repeated: int


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    epochs: tuple[EpochAccount, ...]
    redone: int
    """Samples whose work was discarded and redone."""
    confirmed: int
    """Samples of failed workers that are in the state, as confirmed by other workers."""
    is_complete: bool
    """Whether the run has ended; if not, the counts are as of the last line."""
    skipped: int = 0
    """Samples that the user's script took or left without making a step with them."""
    problems: tuple[str, ...] = ()
    """What makes the counts worthless: two drivers at once, or other data in the middle of an epoch."""

    @property
    def is_clean(self) -> bool:
        return not self.problems and all(e.lost == e.repeated == 0 for e in self.epochs)

    def report_lines(self) -> list[str]:
        lines = list(self.problems)
        for e in self.epochs:
            lines.append(
                f"epoch {e.epoch + 1}: {e.committed:,} of {e.samples:,} samples committed once; "
                f"{e.lost:,} lost, {e.repeated:,} repeated"
            )
        if self.redone:
            lines.append(f"{self.redone:,} samples were discarded, with a failed worker or a rollback, and redone")
        if self.confirmed:
            lines.append(f"{self.confirmed:,} samples of failed workers are in the state, confirmed by other workers")
        if self.skipped:
            lines.append(f"{self.skipped:,} samples were skipped by the script, which made no step with them")
        if not self.is_complete:
            lines.append("The run has not ended; the counts are as of the last line of its ledger.")
        return lines


@dataclass
class _State:
    """What the run's state contains after the lines so far."""

    opened: Opened | None = None
    used: dict[int, np.ndarray] = field(default_factory=dict)  # epoch -> how often each position of the order was used
    steps: dict[int, int] = field(default_factory=dict)  # worker -> the step up to which it has reported
    lost: dict[int, int] = field(default_factory=dict)  # epoch -> samples that are claimed but were never used
    repeated: dict[int, int] = field(default_factory=dict)
    redone: int = 0
    confirmed: int = 0
    first_epoch: int = 0
    """The first epoch with the present data."""
    dropped: dict[int, int] = field(default_factory=dict)  # epoch -> samples left out, because the data changed
    skipped: dict[int, np.ndarray] = field(default_factory=dict)  # epoch -> which samples the script skipped

    def of_epoch(self, epoch: int, count: int) -> np.ndarray:
        """The counters of one epoch."""
        return self.used.setdefault(epoch, np.zeros(count, np.uint8))

    def change_data(self, epoch: int) -> None:
        """From `epoch` on there is other data. What earlier epochs have not used by now is left out."""
        for earlier in range(self.first_epoch, epoch):
            if earlier in self.used:
                self.dropped[earlier] = int((self.used[earlier] == 0).sum())
        self.first_epoch = epoch

    def claim(self, at: Position, requeued: Sequence[Range], count: int) -> None:
        """From now on the state contains all samples before `at` except `requeued`, whatever was used."""
        unreported = self._unreported(at.step)
        for epoch in range(self.first_epoch, max([at.epoch, *self.used]) + 1):
            claimed = np.zeros(count, bool)
            claimed[: count if epoch < at.epoch else at.cursor if epoch == at.epoch else 0] = True
            for e, low, high in requeued:
                if e == epoch:
                    claimed[low:high] = False
            used = self.of_epoch(epoch, count)
            missing = claimed & (used == 0)
            for low, high in unreported.get(epoch, ()):
                self.confirmed += int(missing[low:high].sum())
                missing[low:high] = False
            self.lost[epoch] = self.lost.get(epoch, 0) + int(missing.sum())
            self.redone += int((~claimed & (used > 0)).sum())
            used[:] = np.where(claimed, np.maximum(used, 1), 0)
            if epoch in self.skipped:
                self.skipped[epoch] &= claimed

    @property
    def reported(self) -> int:
        """The step up to which all members of the last view have reported."""
        if self.opened is None:
            return 0
        return min(self.steps.get(worker, self.opened.start[2]) for worker in self.opened.members)

    def _unreported(self, step: int) -> dict[int, list[tuple[int, int]]]:
        """By epoch, the ranges assigned to members of the last view after their last report."""
        found: dict[int, list[tuple[int, int]]] = {}
        if self.opened is not None:
            assignment = self.opened.assignment()
            for rank, worker in enumerate(self.opened.members):
                for epoch, low, high in assignment.between(rank, self.steps.get(worker, assignment.start.step), step):
                    found.setdefault(epoch, []).append((low, high))
        return found


def audit(lines: Iterable[Line]) -> Audit:
    """Audit the lines of a ledger."""
    state, end = _State(), None
    put_off: list[Range] = []
    sessions = _Sessions()
    for number, line in enumerate(lines, start=1):
        sessions.add(line)
        if sessions.problems:
            break
        if isinstance(line, Began):
            continue
        check_line(line, state.opened, state.reported, number)
        if isinstance(line, Opened):
            if line.data_changed:
                state.change_data(line.start[0])
            elif state.opened is not None and line.count != state.opened.count:
                sessions.problems.append(
                    f"The number of samples changed from {state.opened.count:,} to {line.count:,} in epoch "
                    f"{line.start[0] + 1}: the counts below end there."
                )
                break
            state.claim(Position(*line.start), line.requeued, line.count)
            state.opened, state.steps, end = line, {}, None
        elif isinstance(line, Used) and state.opened is not None and line.view == state.opened.view:
            _use(state, line)
        elif isinstance(line, Closed) and state.opened is not None:
            end = Position(*line.at)
            state.claim(end, line.requeued, state.opened.count)
            put_off = list(line.requeued) if line.stopped_early else []
    accounts = [a for epoch in sorted(state.used) if (a := _account(state, epoch, end, put_off)) is not None]
    is_complete = end is not None
    skipped = sum(int(of_epoch.sum()) for of_epoch in state.skipped.values())
    return Audit(
        tuple(accounts), state.redone, state.confirmed, is_complete, skipped=skipped, problems=tuple(sessions.problems)
    )


def _account(state: _State, epoch: int, end: Position | None, put_off: Sequence[Range]) -> EpochAccount | None:
    """The counts of one epoch; None if none of its samples are due."""
    used = state.used[epoch]
    skipped = state.skipped.get(epoch, np.zeros(len(used), bool))
    due = int(((used > 0) & ~skipped).sum())
    if end is not None:
        due = len(used) if epoch < end.epoch else end.cursor if epoch == end.epoch else 0
        due -= sum(high - low for e, low, high in put_off if e == epoch) + state.dropped.get(epoch, 0)
        due -= int(skipped.sum())
    if due == 0 and not used.any():
        return None
    unused = state.lost.get(epoch, 0)  # of the claimed samples
    missing = due - int(((used > 0) & ~skipped).sum())
    committed = int(((used == 1) & ~skipped).sum()) - unused
    return EpochAccount(epoch, due, committed, unused + missing, state.repeated.get(epoch, 0))


class _Sessions:
    """The sessions of drivers, which must follow each other.

    A driver whose lines come after those of a later one has trained at the same time as that one. Then no count says
    what the state contains.
    """

    def __init__(self) -> None:
        self._seen: list[str] = []
        self.problems: list[str] = []

    def add(self, line: Line) -> None:
        session = session_of(line)
        if not session or (self._seen and session == self._seen[-1]):
            return
        if session in self._seen and not self.problems:
            self.problems.append(
                f"Two drivers trained this run at the same time (sessions {session} and {self._seen[-1]}), so its "
                "samples cannot be accounted for."
            )
        self._seen.append(session)


def _use(state: _State, line: Used) -> None:
    assert state.opened is not None
    state.steps[line.worker] = max(state.steps.get(line.worker, 0), line.steps)
    for run in line.runs:
        for epoch, low, high in ranges_of(run):
            used = state.of_epoch(epoch, state.opened.count)
            again = int((used[low:high] > 0).sum())
            if again:
                state.repeated[epoch] = state.repeated.get(epoch, 0) + again
            used[low:high] += 1
            if line.skipped:
                skipped = state.skipped.setdefault(epoch, np.zeros(state.opened.count, bool))
                skipped[low:high] = True


def audit_file(path: Path) -> Audit:
    """Audit the ledger at `path`."""
    return audit(read_ledger(path))
