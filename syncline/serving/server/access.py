"""`Access`: who may ask. With a token, clients that send it; without one, clients on this machine.

Without a token, requests that a web page of another site sends through the user's browser are refused: by their Origin,
and by their Host, which prevents DNS rebinding.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from syncline.serving.server.refusal import RequestRefused

__all__ = ["Access", "LOOPBACK"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SCHEME = b"bearer "


class Access:
    """`token` is None if none is needed."""

    def __init__(self, token: str | None) -> None:
        self._token = token.encode() if token is not None else None

    def check(self, headers: Mapping[bytes, bytes], address: bytes = b"") -> None:
        """Refuse unless the token is in the header or, for the page that people open, in the address."""
        if self._token is None:
            _check_local(headers)
        elif not self._is_known(headers.get(b"authorization", b"")) and not self._is_in(address):
            raise RequestRefused(
                "This server needs its token: Authorization: Bearer TOKEN.", status=401, code="unauthorized"
            )

    def allows(self, authorization: bytes) -> bool:
        """Whether this value of the header is enough, for protocols without addresses."""
        return self._token is None or self._is_known(authorization)

    def _is_known(self, given: bytes) -> bool:
        assert self._token is not None
        return given[: len(_SCHEME)].lower() == _SCHEME and hmac.compare_digest(given[len(_SCHEME) :], self._token)

    def _is_in(self, address: bytes) -> bool:
        assert self._token is not None
        given = parse_qs(urlsplit(address.decode("latin-1")).query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(errors="replace"), self._token)


def _check_local(headers: Mapping[bytes, bytes]) -> None:
    host = headers.get(b"host", b"localhost")
    origin = headers.get(b"origin")
    if _name_of(b"//" + host) not in LOOPBACK:
        raise RequestRefused("Without a token, this server answers to localhost only.", status=403, code="wrong-host")
    if origin is not None and origin.partition(b"://")[2] != host:
        raise RequestRefused("Requests from other sites are refused.", status=403, code="wrong-origin")


def _name_of(address: bytes) -> str | None:
    try:
        return urlsplit(address.decode("latin-1")).hostname
    except ValueError:
        return None
