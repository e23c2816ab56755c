"""`unbreakable`: a stream that outlives its reader. `syncline train ... | head` must not end the training.

Here: one wrapper, used by every view. Not here: what is written.
"""

from __future__ import annotations

import contextlib
import os
from typing import TextIO, cast

__all__ = ["unbreakable"]


def unbreakable(stream: TextIO) -> TextIO:
    """`stream`, except that the first failure to write is swallowed and silence follows.

    A reader that has gone, a terminal that was closed, a disk that is full: none of them is a reason to stop training.
    Characters that the stream cannot encode become question marks.
    """
    return cast("TextIO", stream if isinstance(stream, _Unbreakable) else _Unbreakable(stream))


class _Unbreakable:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self._write(text)
            except (OSError, ValueError) as error:  # ValueError: the file was closed
                self._go_silent(error)
        return len(text)

    def flush(self) -> None:
        if not self._broken:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._go_silent(error)

    def isatty(self) -> bool:
        return not self._broken and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def _go_silent(self, error: Exception) -> None:
        self._broken = True
        if isinstance(error, BrokenPipeError):
            # What is still buffered would fail again when the interpreter exits, and turn its exit code into 120.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
