"""A file of lines that one process appends to, unbuffered.

Here: `AppendFile`, for the ledger and the event log. It starts on a line of its own after a crash, and continues by its
path if the file is removed, moved or replaced while it is written.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from syncline.config.owned_files import open_append


class AppendFile:
    """Lines at the end of the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_append(path)
        self._end_last_line()

    def write(self, line: bytes) -> None:
        self._file.write(line + b"\n")

    def follow(self) -> None:
        """If the path no longer leads to this file, continue with the one there; if there is none, copy all lines.

        A file that is there was written by another process: its lines and ours are then in one file, in order of time.
        """
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self._path), os.fstat(self._file.fileno())):
                return
        self._file.seek(0)
        lines = self._file.read()
        again = open_append(self._path)
        if not os.fstat(again.fileno()).st_size:
            again.write(lines)
        self._file.close()
        self._file = again
        self._end_last_line()

    def close(self) -> None:
        self._file.close()

    def _end_last_line(self) -> None:
        """Terminate a last line that a crash has truncated."""
        size = os.fstat(self._file.fileno()).st_size
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._file.write(b"\n")
