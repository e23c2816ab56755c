"""Writing a large file without the system's cache.

Here: `DirectWriter`. New pages of the cache cost more than the disk does: 344 MB took 0.6 s of a core through the cache
of a virtual machine, and 0.07 s without it. Not here: when a file is complete (`store.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from typing import BinaryIO

_BLOCK_BYTES = 4096
_BUFFER_BYTES = 4 * 2**20


class DirectWriter:
    """What torch.save writes to, in place of `file`, which is new.

    A file system without such a mode is written as usual.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))  # aligned to a page, as the system requires
        self._filled, self._is_direct = 0, False
        with contextlib.suppress(OSError):
            self._set_direct(True)

    def _set_direct(self, is_direct: bool) -> None:
        direct = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | direct if is_direct else flags & ~direct)
        self._is_direct = is_direct

    def write(self, data: bytes | memoryview) -> int:
        source = memoryview(data).cast("B")
        for start in range(0, len(source), _BUFFER_BYTES):
            self._add(source[start : start + _BUFFER_BYTES])
        return len(source)

    def _add(self, part: memoryview) -> None:
        first = min(len(part), _BUFFER_BYTES - self._filled)
        self._buffer[self._filled : self._filled + first] = part[:first]
        self._filled += first
        if self._filled == _BUFFER_BYTES:
            self._drain(_BUFFER_BYTES)
            rest = len(part) - first
            self._buffer[:rest] = part[first:]
            self._filled = rest

    def flush(self) -> None:
        """Nothing: torch calls it before the end, and only whole blocks can be written."""

    def finish(self) -> None:
        """Write what is left, of which the last block is not whole."""
        whole = self._filled - self._filled % _BLOCK_BYTES
        self._drain(whole)
        self._set_direct(False)
        self._drain(self._filled, start=whole)

    def _drain(self, end: int, start: int = 0) -> None:
        while start < end:
            try:
                start += os.write(self._descriptor, self._buffer[start:end])
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._set_direct(False)  # larger blocks, or no such mode after all
            if start % _BLOCK_BYTES:  # the disk is almost full
                self._set_direct(False)
