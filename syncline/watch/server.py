"""The server of the live page: on loopback, for who has the token, and with one thing that can be asked for.

Here: `WatchServer`. Reading needs the token in the address, as the page's own requests have it in a header that no
other site can set; what names another host than this one is refused, or a name that an attacker makes point here
would do. Not here: the page (`page.py`), what the run has come to (`follow.py`), how a run is stopped (it is told).
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from syncline.errors import ConfigError
from syncline.watch.follow import Follower
from syncline.watch.page import TOKEN_HEADER, live_page, news

__all__ = ["WatchServer"]

_LOOPBACK = "127.0.0.1"


class WatchServer:
    """Serves one run until it is closed. `stop` asks the run to save and end."""

    def __init__(self, follower: Follower, stop: Callable[[], None], port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._follower, self._stop = follower, stop
        self._lock = threading.Lock()
        self._news: tuple[str, bytes] = ("", b"")
        try:
            self._server = ThreadingHTTPServer((_LOOPBACK, port), type("Handler", (_Handler,), {"watch": self}))
        except OSError as error:
            raise ConfigError(
                f"Port {port} cannot be used ({error.strerror}). Leave --port out to get a free one."
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.hosts = {f"{_LOOPBACK}:{self.port}", f"localhost:{self.port}"}

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://{_LOOPBACK}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Answer until `close`, or an exception such as Ctrl-C."""
        self._server.serve_forever(poll_interval=0.1)

    def shut_down(self) -> None:
        """Make `serve` return; from another thread."""
        self._server.shutdown()

    def close(self) -> None:
        """Give the port back."""
        self._server.server_close()

    def may(self, token: str | None) -> bool:
        """Whether this is the token."""
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def page(self) -> bytes:
        """The page as it is now."""
        with self._lock:
            self._follower.refresh()
            return live_page(self._follower.record).encode()

    def news(self) -> tuple[str, bytes]:
        """What is known now, and a tag that changes with it."""
        with self._lock:
            tag = f'"{self._follower.refresh()}"'
            if tag != self._news[0]:
                self._news = (tag, json.dumps(news(self._follower.record)).encode())
            return self._news

    def stop_run(self) -> bool:
        """Ask the run to save and end; False if nobody is there to do so."""
        try:
            self._stop()
        except ConfigError:
            return False
        return True


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    watch: WatchServer
    server_version, sys_version = "syncline", ""
    timeout = 10

    def do_GET(self) -> None:
        """The page, or what is new."""
        where = urlsplit(self.path)
        if where.path == "/favicon.ico":
            self._answer(HTTPStatus.NO_CONTENT)
        elif where.path == "/" and self._is_allowed(parse_qs(where.query).get("token", [""])[0]):
            self._answer(HTTPStatus.OK, self.watch.page(), "text/html; charset=utf-8")
        elif where.path == "/news" and self._is_allowed(self.headers.get(TOKEN_HEADER)):
            tag, body = self.watch.news()
            if self.headers.get("If-None-Match") == tag:
                self._answer(HTTPStatus.NOT_MODIFIED, tag=tag)
            else:
                self._answer(HTTPStatus.OK, body, "application/json", tag=tag)
        elif where.path not in ("/", "/news"):
            self._refuse(HTTPStatus.NOT_FOUND, "There is only the page.")

    def do_POST(self) -> None:
        """The one thing that can be asked for."""
        if urlsplit(self.path).path != "/stop":
            self._refuse(HTTPStatus.NOT_FOUND, "There is only /stop.")
        elif self._is_allowed(self.headers.get(TOKEN_HEADER)):
            self._answer(HTTPStatus.ACCEPTED if self.watch.stop_run() else HTTPStatus.CONFLICT)

    def _is_allowed(self, token: str | None) -> bool:
        """Whether to answer; if not, it is said why."""
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in self.watch.hosts:
            self._refuse(HTTPStatus.FORBIDDEN, "This page is for this machine only.")
        elif origin is not None and origin.removeprefix("http://") not in self.watch.hosts:
            self._refuse(HTTPStatus.FORBIDDEN, "Another page may not ask.")
        elif not self.watch.may(token):
            self._refuse(HTTPStatus.FORBIDDEN, "Open the address that 'syncline watch' has printed, token and all.")
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
        """The terminal is not for this."""
