"""`HttpConnection`: the bytes of HTTP/1.1, parsed by httptools, in an asyncio protocol.

Here: one connection: requests in order, pipelined ones included, limits on size and time, and the access log. There is
no timer and no task for a connection: a sweep over all of them (`HttpServer.sweep`) finds those that are too slow, so
that an idle one costs its memory only. Not here: what a request means (`app.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import cast

import httptools

from syncline.serving.server.access_log import AccessLog
from syncline.serving.server.app import App, HttpRequest, Response, refused
from syncline.serving.server.refusal import RequestRefused

__all__ = ["HttpServer"]

_HEADERS = frozenset(
    (b"authorization", b"host", b"origin", b"content-type", b"content-encoding", b"content-length", b"expect",
     b"inference-header-content-length", b"transfer-encoding")
)  # fmt: skip
"""The headers that mean something here."""
_MOST_HEAD_BYTES = 32 * 1024
_LINGER_S = 2.0
"""How long what a refused client still sends is read and dropped: closing at once would destroy our response."""
_HEAD = {s.value: b"HTTP/1.1 %d %b\r\nContent-Type: " % (s.value, s.phrase.encode()) for s in HTTPStatus}


class HttpServer:
    """All connections of a process."""

    def __init__(self, app: App, log: AccessLog, loop: asyncio.AbstractEventLoop) -> None:
        self.app, self.log, self.loop = app, log, loop
        self.connections: set[HttpConnection] = set()

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
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._waiting: deque[tuple[HttpRequest, bool]] = deque()
        self._is_busy = self._is_refused = self._is_reading = self._is_paused = False
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
        try:
            if not self._is_reading:
                self._is_reading, self._since, self._size = True, self._server.loop.time(), 0
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_refused = True  # the request is answered in HTTP/1.1, and nothing more is read
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, RequestRefused):
                raise
            self._refuse(cause)
        except httptools.HttpParserError:
            self._refuse(RequestRefused("This is not HTTP/1.1.", code="malformed"))

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

    # httptools' side

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body, self._size = b"", {}, [], 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        name = name.lower()
        if name in _HEADERS:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        request = HttpRequest(self._parser.get_method(), self._target, self._headers)
        self._app.check_head(request)
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._app.limits.body_bytes:
            raise self._too_large(int(length))
        self._size = 0
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and not self._is_busy:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._app.limits.body_bytes:
            raise self._too_large(self._size)
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        request = HttpRequest(self._parser.get_method(), self._target, self._headers, body)
        self._body, self._is_reading = [], False
        keeps_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        if self._is_busy:
            self._waiting.append((request, keeps_alive))
            self._transport.pause_reading()
        else:
            self._start(request, keeps_alive)

    # requests and responses

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
        parts = [_HEAD[response.status], response.kind, b"\r\nContent-Length: %d\r\n" % len(response.body)]
        for name, value in response.headers:
            parts += [name, b": ", value, b"\r\n"]
        if is_last:
            parts.append(b"Connection: close\r\n")
        parts += [b"X-Content-Type-Options: nosniff\r\n\r\n", response.body]
        self._transport.write(b"".join(parts))

    def _refuse(self, refusal: RequestRefused) -> None:
        """Answer with an error, and read no more requests: where the next one would begin is not certain."""
        self._is_refused, self._since, self._body = True, self._server.loop.time(), []
        if self._is_busy or self._waiting:  # earlier requests are answered first
            self._refusal = refusal
            return
        response = refused(refusal)
        self._write(response, is_last=True)
        if self._server.log.is_on:
            self._server.log.add(self._parser_method(), self._target, response, 0.0)

    def _parser_method(self) -> bytes:
        method: bytes = self._parser.get_method() if self._target else b""
        return method

    def _count_head(self, size: int) -> None:
        self._size += size
        if self._size > _MOST_HEAD_BYTES:
            raise RequestRefused("The head of the request is too long.", status=431, code="head-too-long")

    def _too_large(self, size: int) -> RequestRefused:
        most = self._app.limits.body_bytes
        return RequestRefused(
            f"The request has {size:,} bytes or more; {most:,} are allowed.",
            status=413, code="too-large", size_bytes=size, most_bytes=most,
        )  # fmt: skip

    # time

    def is_overdue(self, now: float) -> bool:
        limits, elapsed = self._app.limits, now - self._since
        if self._is_busy:
            return False  # the queue has its own limit
        if self._is_refused:
            return elapsed > _LINGER_S
        return elapsed > (limits.receive_s if self._is_reading or self._is_paused else limits.idle_s)

    def close_overdue(self) -> None:
        if self._is_reading and not self._is_refused:
            limit = self._app.limits.receive_s
            self._refuse(RequestRefused(f"The request did not arrive within {limit:g} s.", status=408, code="slow"))
        self._transport.abort() if self._is_paused else self._transport.close()

    def close_if_idle(self) -> None:
        if not self._is_busy and not self._is_reading and not self._waiting:
            self._transport.close()
