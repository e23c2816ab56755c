"""A limit to the connections that ZeroMQ accepts before it knows whom from.

Here: `AcceptGuard`. ZeroMQ accepts every connection at once and drops it after some seconds without a handshake; it has
no limit of its own. Enough strangers at its port would use up the descriptors of this process, which then could open no
file either. Not here: the sockets (`zmq_sockets.py`), and servers that have a limit themselves (`listener.py`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import sys
import threading

from syncline.comms.open_sockets import accept_new_connections, drop_new_connections, listeners

_MOST_STRANGERS = 8192  # each costs ZeroMQ some kilobytes
_LOOK_S = 0.1  # how often to look; sooner when a connection is waiting to be accepted
_FLOODED_LOOK_S = 0.005  # but never more often


class AcceptGuard:
    """Closes a port to new connections while too many descriptors are in use, until the strangers' time is up.

    `handshake_s` is how long ZeroMQ keeps a connection without a handshake. Established connections are not affected,
    and a worker that tries to connect meanwhile succeeds at a later attempt.
    """

    def __init__(self, port: int, handshake_s: float) -> None:
        self._listener = _listener_at(port)
        self._listener.setblocking(False)  # for ZeroMQ's descriptor, too: it must not wait for what `_drain` has taken
        self._pause_s = handshake_s + 1.0
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="syncline-accept-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        os.close(self._closing)
        self._listener.close()

    def _run(self) -> None:
        most = most_in_use(self._in_use(), _descriptor_limit())
        while self._closing not in (ready := _readable(_LOOK_S, self._closing, self._listener.fileno())):
            if self._in_use() >= most:
                drop_new_connections(self._listener)
                self._drain()
                is_over = bool(_readable(self._pause_s, self._closing))
                accept_new_connections(self._listener)
                if is_over:
                    return
                # What stayed has authenticated, or is no connection.
                most = max(most, most_in_use(self._in_use(), _descriptor_limit()))
            elif ready and _readable(_FLOODED_LOOK_S, self._closing):
                return

    def _drain(self) -> None:
        """Hang up on those that ZeroMQ has not accepted yet."""
        with contextlib.suppress(OSError):  # there are no more, or no descriptor is left
            while True:
                self._listener.accept()[0].close()

    def _in_use(self) -> int:
        """How many descriptors are in use, as far as they have the lowest numbers; those of a flood do."""
        try:
            lowest_free = os.dup(self._listener.fileno())
        except OSError:  # all are
            return _descriptor_limit()
        os.close(lowest_free)
        return lowest_free


def most_in_use(now: int, limit: int) -> int:
    """How many descriptors may be in use with strangers, if `now` are without them.

    At most a quarter of the rest is theirs: while this thread waits for a processor, ZeroMQ accepts hundreds more.

    >>> most_in_use(24, 1024)
    274
    >>> most_in_use(24, 65536)
    8216
    """
    return now + min(_MOST_STRANGERS, max(0, limit - now) // 4)


def _descriptor_limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _readable(timeout_s: float, *descriptors: int) -> list[int]:
    """Those that become readable within the time."""
    poll = select.poll()  # select takes no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout_s * 1000)]


def _listener_at(port: int) -> socket.socket:
    for _, listener in listeners():
        if listener.getsockname()[1] == port:
            return listener.dup()
    raise AssertionError(f"this process does not listen at port {port}")
