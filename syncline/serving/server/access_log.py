"""The access log: one JSON line for each HTTP response. Lines are collected and written twice a second."""

from __future__ import annotations

import contextlib
import os
import time

import msgspec

from syncline.serving.server.app import Response

__all__ = ["AccessLog"]

_MOST_LINES = 1000
"""More are written at once."""


class AccessLog:
    """Appends to a file descriptor; None for no log. Whole lines, so that processes can share a file."""

    def __init__(self, descriptor: int | None, process: int = 0) -> None:
        self._descriptor, self._process = descriptor, process
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode
        self.is_on = descriptor is not None

    def add(self, method: bytes, target: bytes, response: Response, seconds: float) -> None:
        path = target.partition(b"?")[0]  # what follows may be a token
        line = {
            "time": round(time.time(), 6), "process": self._process, "method": method.decode("latin-1"),
            "path": path.decode("latin-1"), "status": response.status, "ms": round(1e3 * seconds, 3),
            "bytes": len(response.body), "model": response.model, "version": response.version,
        }  # fmt: skip
        self._lines.append(self._encode(line))
        if len(self._lines) >= _MOST_LINES:
            self.flush()

    def flush(self) -> None:
        if self._lines and self._descriptor is not None:
            data = b"\n".join([*self._lines, b""])
            self._lines.clear()
            with contextlib.suppress(OSError):  # a full disk must not end the service
                os.write(self._descriptor, data)
