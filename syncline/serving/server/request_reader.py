"""`RequestReader`: the bytes of HTTP/1.1 into whole requests, parsed by httptools.

Here: the callbacks of the parser, and limits on the size of a request. Not here: the way around the parser for heads
that were read before (`known_heads.py`), the connection, with its order of requests, responses and limits on time
(`http.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import httptools

from syncline.serving.server.app import App, HttpRequest
from syncline.serving.server.known_heads import KnownHeads
from syncline.serving.server.refusal import RequestRefused

__all__ = ["RequestReader"]

_HEADERS = frozenset(
    (b"authorization", b"host", b"origin", b"content-type", b"content-encoding", b"content-length", b"expect",
     b"inference-header-content-length", b"transfer-encoding")
)  # fmt: skip
"""The headers that mean something here."""
_MOST_HEAD_BYTES = 32 * 1024


class RequestReader:
    """Reads the requests of one connection.

    `on_request` gets each whole request, and whether the connection stays open after it. `on_expect` is called when the
    client waits before it sends the body.
    """

    def __init__(
        self,
        app: App,
        heads: KnownHeads,
        on_request: Callable[[HttpRequest, bool], None],
        on_expect: Callable[[], None],
    ) -> None:
        self._app, self._heads, self._on_request, self._on_expect = app, heads, on_request, on_expect
        self._parser = httptools.HttpRequestParser(self)
        self.target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._whole = b""
        """The data in which the present request began; empty if it came in several pieces."""
        self.is_reading = False
        """Whether a part of a request has arrived."""

    @property
    def method(self) -> bytes:
        """The method of the request that is being read; empty before its target is known."""
        method: bytes = self._parser.get_method() if self.target else b""
        return method

    def feed(self, data: bytes) -> bool:
        """Read on; False if what follows is not HTTP/1.1 any more. Raises `RequestRefused`."""
        self._whole = b""
        if not self.is_reading:
            known = self._heads.request_in(data)
            if known is not None:
                self._on_request(known, True)
                return True
            self.is_reading, self._size, self._whole = True, 0, data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return False
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, RequestRefused):
                raise
            raise cause from None
        except httptools.HttpParserError:
            raise RequestRefused("This is not HTTP/1.1.", code="malformed") from None
        return True

    def drop_body(self) -> None:
        """Free what has arrived of a request that is refused."""
        self._body = []

    # httptools' side

    def on_message_begin(self) -> None:
        self.target, self._headers, self._body, self._size = b"", {}, [], 0

    def on_url(self, url: bytes) -> None:
        self.target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        name = name.lower()
        if name in _HEADERS:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        request = HttpRequest(self._parser.get_method(), self.target, self._headers)
        self._app.check_head(request)
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._app.limits.body_bytes:
            raise self._too_large(int(length))
        self._size = 0
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._on_expect()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._app.limits.body_bytes:
            raise self._too_large(self._size)
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        request = HttpRequest(self._parser.get_method(), self.target, self._headers, body)
        self._body, self.is_reading = [], False
        keeps_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        if keeps_alive and self._whole:
            self._heads.remember(self._whole, request)
            self._whole = b""
        self._on_request(request, keeps_alive)

    # limits on size

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
