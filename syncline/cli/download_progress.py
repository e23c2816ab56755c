"""Showing how far a download is: a line that is redrawn in a terminal, a line per file elsewhere."""

from __future__ import annotations

from typing import TextIO

__all__ = ["DownloadProgress"]


class DownloadProgress:
    """A `Progress` callback that writes to a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._announced: set[str] = set()

    def __call__(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        """`done_bytes` of `total_bytes` (if known) have arrived."""
        if self._is_terminal:
            total = f" of {total_bytes / 1e6:.1f}" if total_bytes else ""
            end = "\n" if total_bytes and done_bytes >= total_bytes else ""
            self._stream.write(f"\r\033[K{label}: {done_bytes / 1e6:.1f}{total} MB{end}")
            self._stream.flush()
        elif label not in self._announced:
            self._announced.add(label)
            self._stream.write(f"{label}\n")
            self._stream.flush()
