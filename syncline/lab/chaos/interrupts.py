"""Whether Ctrl-C was pressed, without taking the signal from its handler.

Here: `interrupt_seen`. A run that saves its work at Ctrl-C still does so.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_seen() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM arrived: from then on, a run that saves its work must not be disturbed."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread receives signals
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield lambda: _contains(reader, {signal.SIGINT, signal.SIGTERM})
        finally:
            signal.set_wakeup_fd(before)


def _contains(reader: socket.socket, signals: set[signal.Signals]) -> bool:
    try:
        return bool(signals & set(reader.recv(4096, socket.MSG_PEEK)))
    except BlockingIOError:
        return False
