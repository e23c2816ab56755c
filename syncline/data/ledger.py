"""What became of every sample: who used it when, and what the run's state holds of it.

Here: pure data and its text form; `Tally` adds up, in a worker, the ranges that it has used. Not here: the file
(`ledger_file.py`), what it proves (`audit.py`), and when a worker tells what it has used (`workers/course.py`).

Lines of the ledger, in the order in which they happened:

    Opened   a View begins: from which position, with what to make up for. With it the members claim what their state
             holds: all before that position, but not what is to be made up for.
    Used     a worker has used these samples, as members of that View
    Closed   the run has come to this position, and is saved

A claim overrules what was used: samples that a lost worker had used, but that are not claimed, count as not used and
are dealt out again. The other way round it needs a reason: a sample that is claimed must have been used by somebody who
said so, or have been dealt to a member that was lost before it could say so.

Lines travel to the driver, which writes them. If it is killed, the last ones are gone with it; but a checkpoint holds
the lines that were young when it was made, and whoever resumes from it puts back what is missing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from syncline.data.position import Position
from syncline.data.stint import Range, Stint

__all__ = ["Closed", "Line", "Opened", "RecentLines", "Run", "Tally", "Used", "decode", "encode", "ranges_of"]

YOUNG_S = 10.0
"""The driver writes a line a second after it came. One that is older than this is on disk, or the disk is full."""

Run = tuple[int, int, int, int, int]
"""(epoch, low, high, stride, times): that range, and again `stride` further on, `times` in all."""


class Opened(msgspec.Struct, frozen=True, tag="opened", omit_defaults=True):
    """A View begins."""

    view: int
    members: list[int]
    start: tuple[int, int, int, int]
    """The position: epoch, cursor, step, extra."""
    count: int
    batch: int
    epochs: int | None
    """None: a loop of the user's own decides."""
    makeup: list[Range] = []
    went_back: bool = False
    """Whether the members went back to what was saved."""
    key: str = ""
    """Names this line among all lines of the run: it may be told twice, by its worker and by a checkpoint."""

    def stint(self) -> Stint:
        """What the members have to do."""
        makeup = tuple(self.makeup)
        return Stint(Position(*self.start), len(self.members), self.count, self.batch, self.epochs, makeup)


class Used(msgspec.Struct, frozen=True, tag="used", omit_defaults=True):
    """A worker has used samples."""

    view: int
    worker: int
    steps: int
    """How many steps are done with these."""
    runs: list[Run]
    key: str = ""


class Closed(msgspec.Struct, frozen=True, tag="closed", omit_defaults=True):
    """The run has come to its end, for now."""

    at: tuple[int, int, int, int]
    makeup: list[Range] = []
    stopped_early: bool = False
    """A run that was stopped makes up for the rest when it goes on; one that is through never will."""
    key: str = ""


Line = Opened | Used | Closed

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def encode(line: Line) -> bytes:
    """One line of JSON, without the newline."""
    return msgspec.json.encode(line)


def decode(text: bytes) -> Line:
    """What `encode` made."""
    return _decoder.decode(text)


class Tally:
    """The ranges that one worker has used since it was last asked, in runs."""

    def __init__(self) -> None:
        self._used: list[Iterable[Range]] = []  # as they came: nothing is reckoned in the middle of a step
        self.steps = 0

    def add(self, ranges: Iterable[Range], steps: int) -> None:
        """These were used; `steps` steps are done."""
        self.steps = steps
        self._used.append(ranges)

    def take(self) -> list[Run]:
        """The runs so far; the tally starts again."""
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
    """The lines that one worker wrote lately: the driver may not have them on disk yet.

    `author` is the worker in its present life, in this session of the run; each line gets a key from it.
    """

    def __init__(self, author: str) -> None:
        self._author, self._written = author, 0
        self._lines: deque[tuple[float, bytes]] = deque()

    def add(self, line: Line, now: float) -> bytes:
        """The line as it is to be written, with its key."""
        self._written += 1
        text = encode(msgspec.structs.replace(line, key=f"{self._author}.{self._written}"))
        self._lines.append((now, text))
        self._forget_before(now - YOUNG_S)
        return text

    def texts(self, now: float) -> list[str]:
        """Those that are still young."""
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
