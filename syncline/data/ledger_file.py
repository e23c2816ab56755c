"""The ledger of a run on disk: `ledger.jsonl`, written as lines come in from the workers.

Here: the file. Not here: what the lines mean and prove (`ledger.py`, `audit.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from syncline.data.ledger import Closed, Line, Opened, Used, decode, encode

__all__ = ["LedgerFile", "read_ledger"]

_PATIENCE_S = 1.0


class LedgerFile:
    """Appends lines, a second after they came.

    They come from several workers, each with its own way here: in that second they are put in order, so that a View is
    opened before anybody uses samples in it. The end is written when there is nobody left to add anything.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        if path.stat().st_size:
            self._file.write(b"\n")  # a crash may have cut the last line off
        self._view = 0  # the last one that was opened in the file
        self._waiting: list[tuple[float, Opened | Used]] = []
        self._last: Closed | None = None

    def add(self, line: Line, now: float) -> None:
        """A line has come."""
        if isinstance(line, Closed):
            self._last = line
        else:
            self._waiting.append((now, line))

    def write(self, now: float) -> None:
        """Write what has waited long enough, and whatever belongs before it."""
        due = max((line.view for at, line in self._waiting if now - at >= _PATIENCE_S), default=0)
        lines = [line for _, line in self._waiting if line.view <= due]
        self._waiting = [(at, line) for at, line in self._waiting if line.view > due]
        for line in sorted(lines, key=lambda line: (line.view, isinstance(line, Used))):
            if isinstance(line, Opened):
                if line.view <= self._view:
                    continue  # every member says it, in case one is lost before it is heard
                self._view = line.view
            self._file.write(encode(line) + b"\n")

    def close(self) -> None:
        """No more lines."""
        with contextlib.suppress(OSError):  # a full disk was told of before
            self.write(math.inf)
            if self._last is not None:
                self._file.write(encode(self._last) + b"\n")
        self._file.close()


def read_ledger(path: Path) -> Iterator[Line]:
    """The lines of a ledger; one that was cut off by a crash is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            if text.strip():
                try:
                    yield decode(text)
                except msgspec.DecodeError:
                    continue
