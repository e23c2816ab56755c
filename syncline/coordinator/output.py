"""Following what a worker prints, from its log file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["LogFollower"]


class LogFollower:
    """The lines that are appended to a file after this was made; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def lines(self, *, to_the_end: bool = False) -> Iterator[str]:
        """The whole lines since the last call; with `to_the_end`, also a last one that was never ended."""
        try:
            if self._path.stat().st_size > self._offset:
                with self._path.open("rb") as file:
                    file.seek(self._offset)
                    data = file.read()
                self._offset += len(data)
                *whole, self._rest = (self._rest + data).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace").rstrip("\r")
        except FileNotFoundError:
            return
        if to_the_end and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""
