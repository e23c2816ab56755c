"""`HttpConnection`: one client's connection over HTTP/1.1, as an asyncio protocol.

Here: requests in order, pipelined ones included, their responses, limits on time, and the access log. There is no timer
and no task for a connection: a sweep over all of them (`HttpServer.sweep`) finds those that are too slow, so that an
idle one costs its memory only. Not here: the bytes of a request (`request_reader.py`), what it means (`app.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import cast

from syncline.serving.server.access_log import AccessLog
from syncline.serving.server.app import App, HttpRequest, Response, refused
from syncline.serving.server.known_heads import KnownHeads
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.request_reader import RequestReader

__all__ = ["HttpServer"]

_LINGER_S = 2.0
"""How long what a refused client still sends is read and dropped: closing at once would destroy our response."""
_HEAD = {
    s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode())
    + b"Content-Type: %b\r\nContent-Length: %d\r\n%bX-Content-Type-Options: nosniff\r\n\r\n%b"
    for s in HTTPStatus
}
"""The response of each status, without its type, the length of its body, other headers, and its body."""


class HttpServer:
    """All connections of a process."""

    def __init__(self, app: App, log: AccessLog, loop: asyncio.AbstractEventLoop) -> None:
        self.app, self.log, self.loop = app, log, loop
        self.connections: set[HttpConnection] = set()
        self.heads = KnownHeads()

    def connect(self) -> HttpConnection:
        """The protocol factory."""
        return HttpConnection(self)

    def sweep(self) -> None:
        """Close connections that are idle, or send or receive too slowly. Called about twice a second."""
        now = self.loop.time()
        for connection in [c for c in self.connections if c.is_overdue(now)]:
            connection.close_overdue()
        self.log.flush()

    def stop(self) -> None:
        """Close idle connections; the others are closed after their response."""
        self.app.is_stopping = True
        for connection in list(self.connections):
            connection.close_if_idle()


class HttpConnection(asyncio.Protocol):
    """One client. One request is handled at a time; what follows it waits."""

    def __init__(self, server: HttpServer) -> None:
        self._server, self._app = server, server.app
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._reader = RequestReader(server.app, server.heads, self._on_request, self._on_expect)
        self._waiting: deque[tuple[HttpRequest, bool]] = deque()
        self._is_busy = self._is_refused = self._is_paused = False
        self._keeps_alive = True
        self._refusal: RequestRefused | None = None
        self._since = server.loop.time()
        """When the present phase began: waiting for a request, reading it, answering it, or lingering."""
        self._began = 0.0

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._server.connections) >= self._app.limits.connections:
            self._transport.abort()
            return
        self._server.connections.add(self)
        self._app.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self in self._server.connections:
            self._server.connections.discard(self)
            self._app.connections -= 1
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._reader.is_reading:
            self._since = self._server.loop.time()
        try:
            if not self._reader.feed(data):
                self._is_refused = True  # the request is answered in HTTP/1.1, and nothing more is read
        except RequestRefused as refusal:
            self._refuse(refusal)

    def eof_received(self) -> bool:
        # A client may close its side and wait for the answer.
        return self._is_busy

    def pause_writing(self) -> None:
        self._since = self._server.loop.time()
        self._is_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        if len(self._waiting) == 0:
            self._transport.resume_reading()

    # requests and responses

    def _on_expect(self) -> None:
        """The client waits for leave to send the body."""
        if not self._is_busy:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _on_request(self, request: HttpRequest, keeps_alive: bool) -> None:
        if self._is_busy:
            self._waiting.append((request, keeps_alive))
            self._transport.pause_reading()
        else:
            self._start(request, keeps_alive)

    def _start(self, request: HttpRequest, keeps_alive: bool) -> None:
        self._is_busy, self._keeps_alive = True, keeps_alive
        self._began = self._since = self._server.loop.time()
        self._app.handle(request, lambda response: self._respond(response, request))

    def _respond(self, response: Response, request: HttpRequest) -> None:
        log = self._server.log
        if log.is_on:
            log.add(request.method, request.target, response, self._server.loop.time() - self._began)
        self._is_busy = False
        if self._transport.is_closing():
            return
        is_last = not self._keeps_alive or self._app.is_stopping
        self._write(response, is_last=is_last)
        if is_last:
            self._transport.close()
        elif self._refusal is not None and not self._waiting:
            self._refuse(self._refusal)
        elif self._waiting:
            # Not at once: a deep pipeline of quick requests would recurse.
            self._server.loop.call_soon(self._start_waiting)
        else:
            self._since = self._server.loop.time()

    def _start_waiting(self) -> None:
        if self._waiting and not self._is_busy and not self._transport.is_closing():
            request, keeps_alive = self._waiting.popleft()
            if not self._waiting and not self._is_paused:
                self._transport.resume_reading()
            self._start(request, keeps_alive)

    def _write(self, response: Response, *, is_last: bool) -> None:
        self._app.metrics.status(response.status)
        others = b"".join([b"%b: %b\r\n" % header for header in response.headers])
        if is_last:
            others += b"Connection: close\r\n"
        body = response.body
        self._transport.write(_HEAD[response.status] % (response.kind, len(body), others, body))

    def _refuse(self, refusal: RequestRefused) -> None:
        """Answer with an error, and read no more requests: where the next one would begin is not certain."""
        self._is_refused, self._since = True, self._server.loop.time()
        self._reader.drop_body()
        if self._is_busy or self._waiting:  # earlier requests are answered first
            self._refusal = refusal
            return
        response = refused(refusal)
        self._write(response, is_last=True)
        if self._server.log.is_on:
            self._server.log.add(self._reader.method, self._reader.target, response, 0.0)

    # time

    def is_overdue(self, now: float) -> bool:
        limits, elapsed = self._app.limits, now - self._since
        if self._is_busy:
            return False  # the queue has its own limit
        if self._is_refused:
            return elapsed > _LINGER_S
        return elapsed > (limits.receive_s if self._reader.is_reading or self._is_paused else limits.idle_s)

    def close_overdue(self) -> None:
        if self._reader.is_reading and not self._is_refused:
            limit = self._app.limits.receive_s
            self._refuse(RequestRefused(f"The request did not arrive within {limit:g} s.", status=408, code="slow"))
        self._transport.abort() if self._is_paused else self._transport.close()

    def close_if_idle(self) -> None:
        if not self._is_busy and not self._reader.is_reading and not self._waiting:
            self._transport.close()
