"""`WatchServer`, which serves the live page on loopback and accepts one command: stop.

The page needs the token in its address; its own requests send it in a header that no other site can set. Requests with
another Host header are refused, which prevents DNS rebinding. Not here: the page (`live_page.py`), the state of the run
(`follow.py`), how a run is stopped (a callback), how the browser gets the address (`open_page.py`).
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from syncline.errors import ConfigError
from syncline.observe.live.follow import Follower
from syncline.observe.live.live_page import TOKEN_HEADER, live_page, update

_LOOPBACK = "127.0.0.1"
_MOST_REQUESTS = 64
"""How many requests are handled at a time; each has a thread, and a client can hold it for `_Handler.timeout`."""


class WatchServer:
    """Serves one run until it is closed. `stop` requests that the run save and stop."""

    def __init__(self, follower: Follower, stop: Callable[[], None], port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._follower, self._stop = follower, stop
        self._lock = threading.Lock()
        self._update: tuple[str, bytes] = ("", b"")
        self.on_page: Callable[[], None] = lambda: None
        """Called whenever the page itself is requested."""
        try:
            self._server = _BoundedServer((_LOOPBACK, port), type("Handler", (_Handler,), {"watch": self}))
        except OSError as error:
            raise ConfigError(
                f"Cannot use port {port} ({error.strerror}). Leave --port out to get a free one."
            ) from error
        self.port: int = self._server.server_address[1]
        self.hosts = {f"{_LOOPBACK}:{self.port}", f"localhost:{self.port}"}

    @property
    def address(self) -> str:
        return f"http://{_LOOPBACK}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Serve until `shut_down`, or an exception such as Ctrl-C."""
        self._server.serve_forever(poll_interval=0.1)

    def shut_down(self) -> None:
        """Make `serve` return; from another thread."""
        self._server.shutdown()

    def close(self) -> None:
        self._server.server_close()

    def may(self, token: str | None) -> bool:
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def page(self) -> bytes:
        self.on_page()
        with self._lock:
            self._follower.refresh()
            return live_page(self._follower.record).encode()

    def update(self) -> tuple[str, bytes]:
        """The current content as JSON, and its ETag."""
        with self._lock:
            tag = f'"{self._follower.refresh()}"'
            if tag != self._update[0]:
                self._update = (tag, json.dumps(update(self._follower.record)).encode())
            return self._update

    def stop_run(self) -> bool:
        """Request that the run save and stop; False if it is not live."""
        try:
            self._stop()
        except ConfigError:
            return False
        return True


class _BoundedServer(ThreadingHTTPServer):
    """Hangs up on connections beyond `_MOST_REQUESTS`."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.Semaphore(_MOST_REQUESTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser drops connections whenever it likes: that is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    watch: WatchServer
    server_version, sys_version = "syncline", ""
    timeout = 10

    def do_GET(self) -> None:
        try:
            where = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "Not an address: the page is at /.")
            return
        if where.path == "/favicon.ico":
            self._answer(HTTPStatus.NO_CONTENT)
        elif where.path == "/" and self._is_allowed(parse_qs(where.query).get("token", [""])[0]):
            self._answer(HTTPStatus.OK, self.watch.page(), "text/html; charset=utf-8")
        elif where.path == "/update" and self._is_allowed(self.headers.get(TOKEN_HEADER)):
            tag, body = self.watch.update()
            if self.headers.get("If-None-Match") == tag:
                self._answer(HTTPStatus.NOT_MODIFIED, tag=tag)
            else:
                self._answer(HTTPStatus.OK, body, "application/json", tag=tag)
        elif where.path not in ("/", "/update"):
            self._refuse(HTTPStatus.NOT_FOUND, "Not found: the page is at /.")

    def do_POST(self) -> None:
        if self.path.partition("?")[0] != "/stop":
            self._refuse(HTTPStatus.NOT_FOUND, "Not found: the only command is /stop.")
        elif self._is_allowed(self.headers.get(TOKEN_HEADER)):
            self._answer(HTTPStatus.ACCEPTED if self.watch.stop_run() else HTTPStatus.CONFLICT)

    def _is_allowed(self, token: str | None) -> bool:
        """Whether to answer; if not, send the reason."""
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in self.watch.hosts:
            self._refuse(HTTPStatus.FORBIDDEN, "This page is served to this machine only.")
        elif origin is not None and origin.removeprefix("http://") not in self.watch.hosts:
            self._refuse(HTTPStatus.FORBIDDEN, "Requests from other sites are refused.")
        elif not self.watch.may(token):
            self._refuse(HTTPStatus.FORBIDDEN, "Open the address that 'syncline watch' printed, with its token.")
        else:
            return True
        return False

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, why.encode(), "text/plain; charset=utf-8")

    def _answer(self, status: HTTPStatus, body: bytes = b"", kind: str = "", tag: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "ETag": tag, "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
        }  # fmt: skip
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged to the terminal."""
