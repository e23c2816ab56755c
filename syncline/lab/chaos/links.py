"""Cuts real links at a given step, on request of the worker that reached it.

Here: `LinkCutter`, a thread of the driver's process that cuts a worker's link when the worker requests it
(`lab/faults/`) and restores it after the given time, whether that worker is still alive or not. Not here: the links
themselves (`lab/namespaces.py`).

They communicate through a Unix socket, which no network fault affects. The worker waits for the reply, so that the link
is down before it begins the step.
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
from syncline.lab.faults import LINKS
from syncline.lab.namespaces import Namespaces

_REQUEST_S = 2.0


class LinkCutter:
    """A context in which workers can have their links cut. On exit, all links are up again."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self._cut: dict[int, float] = {}  # namespace -> when to restore it
        self._closed = threading.Event()

    def __enter__(self) -> LinkCutter:
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
        with socket.socket(socket.AF_UNIX) as wake_up:
            wake_up.connect(str(self._folder / "socket"))
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder)

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._heal(time.monotonic())
            first = min(self._cut.values(), default=math.inf)
            self._listener.settimeout(None if first == math.inf else max(0.001, first - time.monotonic()))
            with contextlib.suppress(OSError):  # time to restore a link, or the worker is gone
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(_REQUEST_S)
                    connection.sendall(self._handle(connection.recv(4096)))
        self._heal(math.inf)

    def _handle(self, request: bytes) -> bytes:
        """The reply: `done`, or the reason why not."""
        try:
            worker, for_s = json.loads(request)
            number = self._namespaces.number_of(worker)
        except (ValueError, TypeError):
            return b"malformed request"
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
            with contextlib.suppress(SynclineError):  # the run will show it
                self._namespaces.heal(number)
