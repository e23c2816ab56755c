"""The ledger of a run on disk: `ledger.jsonl`, written as lines arrive from the workers.

Here: the file. Not here: the lines and the audit (`ledger.py`, `audit.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from syncline.config.owned_files import open_regular, replace_file
from syncline.data.append_file import AppendFile
from syncline.data.ledger import Began, Closed, Line, Opened, Used, decode, encode, session_of

_PATIENCE_S = 1.0


class LedgerFile:
    """Appends lines one second after they arrive.

    Lines from several workers arrive in any order. The delay allows to sort them, so that a view is opened before its
    samples are used. The closing line is written last.
    """

    def __init__(self, path: Path, began: Began | None = None) -> None:
        """`began` is this driver's first line."""
        self._file = AppendFile(path)
        if began is not None:
            self._file.write(encode(began))
        self._view = 0  # the last view opened in the file
        self._waiting: list[tuple[float, Opened | Used]] = []
        self._last: Closed | None = None

    def add(self, line: Line, now: float) -> None:
        if isinstance(line, Closed):
            self._last = line
        elif not isinstance(line, Began):  # a driver's own line, which no worker sends
            self._waiting.append((now, line))

    def write(self, now: float) -> None:
        """Write the lines that have waited long enough, and all lines that belong before them."""
        due = max((line.view for at, line in self._waiting if now - at >= _PATIENCE_S), default=0)
        lines = [line for _, line in self._waiting if line.view <= due]
        self._waiting = [(at, line) for at, line in self._waiting if line.view > due]
        for line in sorted(lines, key=_place):
            if isinstance(line, Opened):
                if line.view <= self._view:
                    continue  # every member sends it, in case one fails before its line arrives
                self._view = line.view
            self._file.write(encode(line))

    def follow(self, began: Began | None = None) -> None:
        """Continue in the file at the path if that is another one now; `began` names this driver in it."""
        self._file.follow()
        if began is not None:
            self._file.write(encode(began))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported before
            self.write(math.inf)
            if self._last is not None:
                self._file.write(encode(self._last))
        self._file.close()


def put_back(path: Path, texts: Iterable[str]) -> None:
    """Add the lines of a checkpoint that are missing because the driver was killed before writing them."""
    lines = list(read_ledger(path))
    known = {line.key for line in lines if line.key}
    missing = [line for text in texts if (line := decode(text.encode())).key not in known]
    if not missing:
        return
    # View numbers restart in each session of a run; all recent lines of a checkpoint are from one session.
    session = session_of(missing[0])
    before = [i for i, line in enumerate(lines) if session_of(line) == session]
    first, after = (before[0], before[-1] + 1) if before else (len(lines), len(lines))
    repaired = lines[:first] + _in_order([*lines[first:after], *missing]) + lines[after:]
    replace_file(path, b"".join(encode(line) + b"\n" for line in repaired))


def _in_order(lines: Iterable[Line]) -> list[Line]:
    """The lines of one session: each view is opened once, before its samples are used."""
    ordered: list[Line] = []
    opened = 0
    for line in sorted(lines, key=_place):
        if isinstance(line, Opened):
            if line.view <= opened:
                continue  # every member sends it, in case one fails before its line arrives
            opened = line.view
        ordered.append(line)
    return ordered


def _place(line: Line) -> tuple[float, int]:
    """The sort key of a line within its session."""
    if isinstance(line, Closed):
        return math.inf, 0
    if isinstance(line, Began):
        return -1, 0
    return line.view, line.steps if isinstance(line, Used) else -1


def read_ledger(path: Path) -> Iterator[Line]:
    """The lines of a ledger; a line truncated by a crash is skipped."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        for text in file:
            if text.strip():
                try:
                    yield decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
