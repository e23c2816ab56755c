"""`unbreakable`: a stream that survives a closed pipe. `syncline train ... | head` must not stop the training."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TextIO, cast


def unbreakable(stream: TextIO | None) -> TextIO:
    """`stream`, but after the first failed write all output is dropped; None is what Python has if it was closed.

    A closed pipe, a closed terminal or a full disk must not stop training. Characters that the stream cannot encode
    become question marks.
    """
    return cast("TextIO", stream if isinstance(stream, _Unbreakable) else _Unbreakable(stream))


class _Unbreakable:
    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None else io.StringIO()
        self._broken = stream is None

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self._write(text)
            except (OSError, ValueError) as error:  # ValueError: the file was closed
                self._drop_output(error)
        return len(text)

    def flush(self) -> None:
        if not self._broken:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._drop_output(error)

    def isatty(self) -> bool:
        return not self._broken and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def _drop_output(self, error: Exception) -> None:
        self._broken = True
        if isinstance(error, BrokenPipeError):
            # Buffered output would fail again at exit and turn the exit code into 120.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
