"""What became of every sample of a run, as its ledger says.

Here: `audit`, which reads the whole ledger and says of each epoch how many samples were used once, never or more than
once. Not here: the lines of the ledger and what they mean (`ledger.py`). Apart from it because it needs NumPy, which
the driver is spared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from syncline.data.ledger import Closed, Line, Opened, Used, ranges_of
from syncline.data.ledger_file import read_ledger
from syncline.data.position import Position
from syncline.data.stint import Range

__all__ = ["Audit", "EpochAccount", "audit", "audit_file"]


@dataclass(frozen=True)
class EpochAccount:
    """What became of the samples of one epoch."""

    epoch: int
    samples: int
    """How many had to be used by now."""
    committed: int
    """How many are in the state of the run exactly once."""
    lost: int
    repeated: int


@dataclass(frozen=True)
class Audit:
    """What the ledger says."""

    epochs: tuple[EpochAccount, ...]
    redone: int
    """How many samples were used in vain, and again later."""
    vouched: int
    """How many samples of lost workers are in the state as the others say."""
    is_complete: bool
    """Whether the run had come to an end; otherwise this is as of the last line."""

    @property
    def is_clean(self) -> bool:
        """Nothing lost, nothing repeated."""
        return all(e.lost == e.repeated == 0 for e in self.epochs)

    def in_words(self) -> list[str]:
        """For people."""
        lines = []
        for e in self.epochs:
            lines.append(
                f"epoch {e.epoch + 1}: {e.committed:,} of {e.samples:,} samples committed once; "
                f"{e.lost:,} lost, {e.repeated:,} repeated"
            )
        if self.redone:
            lines.append(
                f"{self.redone:,} samples were used in vain, by a lost worker or after what was saved, and again"
            )
        if self.vouched:
            lines.append(f"{self.vouched:,} samples of lost workers are in the state, as the other workers say")
        if not self.is_complete:
            lines.append("The run has not come to an end: this is the account as of the last line of its ledger.")
        return lines


@dataclass
class _State:
    """What the run's state holds, as far as the lines so far say."""

    opened: Opened | None = None
    used: dict[int, np.ndarray] = field(default_factory=dict)  # epoch -> how often each place of the order was used
    steps: dict[int, int] = field(default_factory=dict)  # worker -> up to which step it has said what it used
    lost: dict[int, int] = field(default_factory=dict)  # epoch -> samples that are claimed, but were never used
    repeated: dict[int, int] = field(default_factory=dict)
    redone: int = 0
    vouched: int = 0

    def of_epoch(self, epoch: int, count: int) -> np.ndarray:
        """The counters of one epoch."""
        return self.used.setdefault(epoch, np.zeros(count, np.uint8))

    def claim(self, at: Position, makeup: Sequence[Range], count: int) -> None:
        """From now on the state holds all before `at`, but not `makeup`, whatever was used."""
        vouchers = self._unheard(at.step)
        for epoch in range(max([at.epoch, *self.used]) + 1):
            claimed = np.zeros(count, bool)
            claimed[: count if epoch < at.epoch else at.cursor if epoch == at.epoch else 0] = True
            for e, low, high in makeup:
                if e == epoch:
                    claimed[low:high] = False
            used = self.of_epoch(epoch, count)
            missing = claimed & (used == 0)
            for low, high in vouchers.get(epoch, ()):
                self.vouched += int(missing[low:high].sum())
                missing[low:high] = False
            self.lost[epoch] = self.lost.get(epoch, 0) + int(missing.sum())
            self.redone += int((~claimed & (used > 0)).sum())
            used[:] = np.where(claimed, np.maximum(used, 1), 0)

    def _unheard(self, step: int) -> dict[int, list[tuple[int, int]]]:
        """What members of the last View had been dealt after the last that they said, by epoch."""
        found: dict[int, list[tuple[int, int]]] = {}
        if self.opened is not None:
            stint = self.opened.stint()
            for rank, worker in enumerate(self.opened.members):
                for epoch, low, high in stint.between(rank, self.steps.get(worker, stint.start.step), step):
                    found.setdefault(epoch, []).append((low, high))
        return found


def audit(lines: Iterable[Line]) -> Audit:
    """What the lines of a ledger say."""
    state, end = _State(), None
    put_off: list[Range] = []
    for line in lines:
        if isinstance(line, Opened):
            state.claim(Position(*line.start), line.makeup, line.count)
            state.opened, state.steps, end = line, {}, None
        elif isinstance(line, Used) and state.opened is not None and line.view == state.opened.view:
            _use(state, line)
        elif isinstance(line, Closed) and state.opened is not None:
            end = Position(*line.at)
            state.claim(end, line.makeup, state.opened.count)
            put_off = list(line.makeup) if line.stopped_early else []
    if state.opened is None:
        return Audit((), 0, 0, is_complete=False)
    accounts = []
    for epoch in sorted(state.used):
        used = state.used[epoch]
        due = int((used > 0).sum())
        if end is not None:
            due = state.opened.count if epoch < end.epoch else end.cursor if epoch == end.epoch else 0
            due -= sum(high - low for e, low, high in put_off if e == epoch)
        if due == 0 and not used.any():
            continue
        unused = state.lost.get(epoch, 0)  # of those that the state is said to hold
        missing = due - int((used > 0).sum())
        committed = int((used == 1).sum()) - unused
        accounts.append(EpochAccount(epoch, due, committed, unused + missing, state.repeated.get(epoch, 0)))
    return Audit(tuple(accounts), state.redone, state.vouched, is_complete=end is not None)


def _use(state: _State, line: Used) -> None:
    assert state.opened is not None
    state.steps[line.worker] = line.steps
    for run in line.runs:
        for epoch, low, high in ranges_of(run):
            used = state.of_epoch(epoch, state.opened.count)
            again = int((used[low:high] > 0).sum())
            if again:
                state.repeated[epoch] = state.repeated.get(epoch, 0) + again
            used[low:high] += 1


def audit_file(path: Path) -> Audit:
    """What became of every sample of the run whose ledger this is."""
    return audit(read_ledger(path))
