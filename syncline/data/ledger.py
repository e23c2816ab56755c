"""The sample ledger: which worker used which samples, and which of them the run's state contains.

Here: the lines and their JSON form; `Tally` collects the ranges that a worker used. Not here: the file
(`ledger_file.py`), the audit (`audit.py`), and when a worker reports its samples (`workers/data_progress.py`).

Lines of the ledger, in order of time:

    Began    a driver starts or resumes the run; the session of a line is the first part of its key
    Opened   a membership view begins at a position, with requeued samples. Its members claim that their state contains
             all samples before that position, except the requeued ones.
    Used     a worker used these samples as a member of that view, or its script skipped them
    Closed   the run reached this position and was saved

A claim overrides use: samples that a failed worker used, but that are not claimed, count as unused and are assigned
again. The converse needs a reason: a claimed sample must have been reported as used, or have been assigned to a member
that failed before it could report.

Workers send lines to the driver, which writes them. If the driver is killed, its last lines are lost with it; but a
checkpoint contains the recent lines of its time, and resuming from it restores the missing ones.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from syncline.data.assignment import Assignment, Position, Range

YOUNG_S = 10.0
"""The driver writes a line one second after it arrives. A line older than this is on disk, or the disk is full."""

Run = tuple[int, int, int, int, int]
"""(epoch, low, high, stride, times): a range that repeats `times` times, each `stride` further."""


class Began(msgspec.Struct, frozen=True, tag="began", omit_defaults=True):
    """A driver starts or resumes the run."""

    run_id: str
    driver: str
    """For people: its process and host."""
    key: str = ""


class Opened(msgspec.Struct, frozen=True, tag="opened", omit_defaults=True):
    """A View begins."""

    view: int
    members: list[int]
    start: tuple[int, int, int, int]
    """The position: epoch, cursor, step, extra."""
    count: int
    batch: int
    epochs: int | None
    """None if the user's own loop decides."""
    requeued: list[Range] = []
    rolled_back: bool = False
    """Whether the members rolled back to a checkpoint."""
    data_changed: bool = False
    """Whether the run was resumed with other data: the rest of the last epoch is dropped, and a new one begins."""
    key: str = ""
    """Identifies this line in the run: it may arrive twice, from its worker and from a checkpoint."""

    def assignment(self) -> Assignment:
        """The samples that the members are to train on."""
        requeued = tuple(self.requeued)
        return Assignment(Position(*self.start), len(self.members), self.count, self.batch, self.epochs, requeued)


class Used(msgspec.Struct, frozen=True, tag="used", omit_defaults=True):
    """A worker has used samples."""

    view: int
    worker: int
    steps: int
    """The worker's step count after these samples."""
    runs: list[Run]
    key: str = ""
    skipped: bool = False
    """Whether the script took these samples, or left them, without making a step with them. They are not due."""


class Closed(msgspec.Struct, frozen=True, tag="closed", omit_defaults=True):
    """The run ended or was stopped."""

    at: tuple[int, int, int, int]
    requeued: list[Range] = []
    stopped_early: bool = False
    """A stopped run trains on the requeued samples when it is resumed; a finished run never does."""
    key: str = ""


Line = Began | Opened | Used | Closed

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def encode(line: Line) -> bytes:
    """One line of JSON, without the newline."""
    return msgspec.json.encode(line)


def decode(text: bytes) -> Line:
    return _decoder.decode(text)


def session_of(line: Line) -> str:
    """The session of the driver that wrote this line."""
    return line.key.partition(".")[0]


class Tally:
    """The ranges that one worker used since the last `take`, run-length encoded."""

    def __init__(self) -> None:
        self._used: list[Iterable[Range]] = []  # encoded later, to keep the step fast
        self.steps = 0

    def add(self, ranges: Iterable[Range], steps: int) -> None:
        """Add ranges that were used; the worker has now done `steps` steps."""
        self.steps = steps
        self._used.append(ranges)

    def take(self) -> list[Run]:
        """The runs so far; resets the tally."""
        used, self._used = self._used, []
        runs: list[Run] = []
        for epoch, low, high in itertools.chain.from_iterable(used):
            if runs and _continues(runs[-1], epoch, low, high):
                first, a, b, stride, times = runs[-1]
                runs[-1] = (first, a, b, stride if times > 1 else low - a, times + 1)
            else:
                runs.append((epoch, low, high, 0, 1))
        return runs


class RecentLines:
    """The recent lines of one worker, which the driver may not have written to disk yet.

    `author` identifies this worker process in this session of the run; each line gets a key from it.
    """

    def __init__(self, author: str) -> None:
        self._author, self._written = author, 0
        self._lines: deque[tuple[float, bytes]] = deque()

    def add(self, line: Line, now: float) -> bytes:
        """The encoded line with its key."""
        self._written += 1
        text = encode(msgspec.structs.replace(line, key=f"{self._author}.{self._written}"))
        self._lines.append((now, text))
        self._forget_before(now - YOUNG_S)
        return text

    def texts(self, now: float) -> list[str]:
        """The lines that are still recent."""
        self._forget_before(now - YOUNG_S)
        return [text.decode() for _, text in self._lines]

    def _forget_before(self, time: float) -> None:
        while self._lines and self._lines[0][0] < time:
            self._lines.popleft()


def ranges_of(run: Run) -> Iterator[Range]:
    """The ranges of a run."""
    epoch, low, high, stride, times = run
    for number in range(times):
        yield epoch, low + number * stride, high + number * stride


def _continues(run: Run, epoch: int, low: int, high: int) -> bool:
    first, a, b, stride, times = run
    if first != epoch or b - a != high - low or low <= a:
        return False
    return times == 1 or low == a + stride * times
