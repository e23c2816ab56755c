"""The ledger of a run on disk: `ledger.jsonl`, written as lines come in from the workers.

Here: the file. Not here: what the lines mean and prove (`ledger.py`, `audit.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from syncline.data.ledger import Closed, Line, Opened, Used, decode, encode

__all__ = ["LedgerFile", "read_ledger"]


class LedgerFile:
    """Appends lines; each is on its way to the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        if path.stat().st_size:
            self._file.write(b"\n")  # a crash may have cut the last line off
        self._view = 0
        self._early: list[Used] = []
        self._last: Closed | None = None

    def write(self, line: Line) -> None:
        """One line. Lines come from several workers: what one has used is kept back until another has opened the View,
        and the end until all have ended.
        """
        if isinstance(line, Closed):
            self._last = line
            return
        if isinstance(line, Used) and line.view > self._view:
            self._early.append(line)
            return
        self._file.write(encode(line) + b"\n")
        if isinstance(line, Opened):
            self._view = line.view
            early, self._early = self._early, []
            for each in early:
                self.write(each)

    def close(self) -> None:
        """No more lines."""
        if self._last is not None:
            with contextlib.suppress(OSError):  # a full disk was told of before
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
