"""Cutting real links at a given step: a worker asks, and somebody outside its network does it.

Here: `Links`, a thread of the driver's process that cuts a worker's link when the worker says that it has come to that
step (`testing/faults.py`), and heals it after the time, whether that worker still lives or not. Not here: the links
themselves (`testing/namespaces.py`).

They talk through a socket in the file system, which no cut of a network touches. The worker waits for the answer, so
that the link is cut before it begins the step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

from syncline.errors import SynclineError
from syncline.testing.faults import LINKS
from syncline.testing.namespaces import Namespaces

__all__ = ["Links"]

_REQUEST_S = 2.0


class Links:
    """For `with`: workers that are started meanwhile can have their links cut. At the end all links are whole."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self._cut: dict[int, float] = {}  # the namespace -> until when
        self._closed = threading.Event()

    def __enter__(self) -> Links:
        self._folder = Path(tempfile.mkdtemp(prefix="syncline-links-"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen()
        os.environ[LINKS] = str(self._folder / "socket")
        self._thread = threading.Thread(target=self._serve, name="syncline-links", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(LINKS, None)
        self._closed.set()
        with socket.socket(socket.AF_UNIX) as bell:
            bell.connect(str(self._folder / "socket"))
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder)

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._heal(time.monotonic())
            first = min(self._cut.values(), default=math.inf)
            self._listener.settimeout(None if first == math.inf else max(0.001, first - time.monotonic()))
            with contextlib.suppress(OSError):  # it is time to heal one, or the worker is gone by now
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(_REQUEST_S)
                    connection.sendall(self._obey(connection.recv(4096)))
        self._heal(math.inf)

    def _obey(self, request: bytes) -> bytes:
        """The answer: `done`, or why not."""
        try:
            worker, for_s = json.loads(request)
            number = self._namespaces.number_of(worker)
        except (ValueError, TypeError):
            return b"this makes no sense"
        try:
            self._namespaces.cut(number)
        except SynclineError as error:
            return str(error).encode()
        until = math.inf if for_s is None else time.monotonic() + for_s
        self._cut[number] = max(until, self._cut.get(number, 0.0))
        return b"done"

    def _heal(self, now: float) -> None:
        for number in [n for n, until in self._cut.items() if until <= now]:
            del self._cut[number]
            with contextlib.suppress(SynclineError):  # then the run shows it
                self._namespaces.heal(number)
