"""Whether Ctrl-C was pressed, for whoever runs others that take it.

Here: `ctrl_c_seen`. It takes the signal from nobody: a run that saves its work at Ctrl-C goes on doing so.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["ctrl_c_seen"]


@contextmanager
def ctrl_c_seen() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, whoever takes it: a run that saves its work should be left alone by then."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread can take signals
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield lambda: _holds(reader, {signal.SIGINT, signal.SIGTERM})
        finally:
            signal.set_wakeup_fd(before)


def _holds(reader: socket.socket, signals: set[signal.Signals]) -> bool:
    try:
        return bool(signals & set(reader.recv(4096, socket.MSG_PEEK)))
    except BlockingIOError:
        return False
