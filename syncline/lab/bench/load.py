"""`LoadClient`: sends HTTP requests to a server on this machine, and times the answers.

Here: one thread, plain sockets and epoll, which costs about 15 microseconds of CPU per request, so that on two cores
the server is what is measured. Two ways: `ask` keeps some connections busy (a closed loop), `ask_at` sends at a rate,
whether the server keeps up or not (an open loop). Not here: the requests, and what is compared (`serve.py`,
`serve_load.py`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from syncline.errors import SynclineError

__all__ = ["Answers", "LoadClient", "percentile"]

_LIMIT_S = 60.0
_LENGTH = b"content-length: "


@dataclass(frozen=True)
class Answers:
    """What came back, in the order of the answers."""

    took_s: float
    """From the first request to the last answer."""
    statuses: list[int] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    """When each request was sent, from the start."""
    seconds: list[float] = field(default_factory=list)
    """From sending each request to its whole answer."""

    def times(self, status: int, from_s: float = 0.0) -> list[float]:
        """The seconds of the answers with this status, of requests that were sent after `from_s`."""
        found = zip(self.statuses, self.sent_s, self.seconds, strict=True)
        return [seconds for one, sent_s, seconds in found if one == status and sent_s >= from_s]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.75)
    3.0
    """
    if not values:
        raise SynclineError("There is no answer of this kind to measure.", code="no-answers")
    ranked = sorted(values)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)]


class LoadClient:
    """Connections to one server, each with one request at a time. Use it as a context."""

    def __init__(self, port: int, request: bytes, connections: int) -> None:
        self._request = request
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        try:
            for _ in range(connections):
                self._connect(port)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for one in self._sockets.values():
            one.close()
        self._sockets.clear()
        with contextlib.suppress(OSError):
            self._poll.close()

    def ask(self, count: int) -> Answers:
        """Send `count` requests; each connection sends the next one when it has its answer."""
        return self._run([0.0] * count, must_keep_up=False)

    def ask_all(self, count: int) -> Answers:
        """As `ask`; `SynclineError` if a request gets an error."""
        found = self.ask(count)
        if wrong := sorted(set(found.statuses) - {200}):
            raise SynclineError(f"The server answered with {wrong}.", code="wrong-answers", statuses=wrong)
        return found

    def ask_at(self, rate: float, seconds: float) -> Answers:
        """Send requests at this rate for so long. `SynclineError` if this client cannot keep up."""
        return self._run([k / rate for k in range(int(rate * seconds))], must_keep_up=True)

    def _run(self, due_s: Sequence[float], *, must_keep_up: bool) -> Answers:
        free, sent, parts = list(self._sockets), dict[int, float](), dict[int, bytes]()
        statuses, sent_s, seconds = list[int](), list[float](), list[float]()
        start, following, latest = time.perf_counter(), 0, 0.0
        while len(statuses) < len(due_s):
            now = time.perf_counter()
            while free and following < len(due_s) and start + due_s[following] <= now:
                latest = max(latest, now - start - due_s[following])
                number = free.pop()
                sent[number] = now = time.perf_counter()
                self._sockets[number].sendall(self._request)
                following += 1
            if now - start > _LIMIT_S + due_s[-1]:
                raise SynclineError("The server does not answer.", code="no-answers")
            for number, _ in self._poll.poll(self._patience(must_keep_up)):
                parts[number] = parts.get(number, b"") + self._received(number)
                if (status := _status_if_whole(parts[number])) is not None:
                    del parts[number]
                    began = sent.pop(number)
                    statuses.append(status)
                    sent_s.append(began - start)
                    seconds.append(time.perf_counter() - began)
                    free.append(number)
        took_s = time.perf_counter() - start
        if must_keep_up and took_s > 1.2 * due_s[-1] + 1:
            raise SynclineError(
                f"The client could not send {len(due_s) / due_s[-1]:.0f} requests per second: the last one was "
                f"{latest:.1f} s late.",
                code="client-too-slow",
            )  # fmt: skip
        return Answers(took_s, statuses, sent_s, seconds)

    @staticmethod
    def _patience(must_keep_up: bool) -> float:
        """An open loop does not sleep: epoll wakes up in steps of a millisecond, which is late for the next request."""
        return 0.0 if must_keep_up else 1.0

    def _received(self, number: int) -> bytes:
        data = self._sockets[number].recv(65536)
        if not data:
            raise SynclineError("The server closed a connection.", code="connection-closed")
        return data

    def _connect(self, port: int) -> None:
        one = socket.create_connection(("127.0.0.1", port), _LIMIT_S)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[one.fileno()] = one
        self._poll.register(one, select.EPOLLIN)


def _status_if_whole(data: bytes) -> int | None:
    """The status of this answer; None if a part of it is missing."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    place = data.lower().find(_LENGTH, 0, end) + len(_LENGTH)
    size = int(data[place : data.find(b"\r", place)])
    return int(data[9:12]) if len(data) >= end + 4 + size else None
