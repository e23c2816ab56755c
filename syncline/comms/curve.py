"""Sockets that only those of a run get through to: ZeroMQ with CURVE keys.

Here: the keys, `Router`, which many connect to, and `Dealer`, which connects. Not here: what is said (`control.py`,
`engines/outposts/messages.py`).

There are two key pairs, one of the end that listens and one that all who connect have; only who was handed the second
gets through, and all traffic is encrypted. Who connects and has no key costs a descriptor, for a few seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import resource
import secrets
from typing import NamedTuple

import zmq
import zmq.auth.thread
from zmq.utils import z85

__all__ = ["Dealer", "Keys", "Router"]

_CONNECT_MS = 2000  # then anew: the kernel would wait longer each time for an answer from a network that was cut
_HANDSHAKE_MS = 5000  # who is late is cut off; ZeroMQ lets a client try again by itself
_LONGEST_MESSAGE = 4 * 1024 * 1024  # what is longer ends the connection; a stranger may send that much, too
_BACKLOG = 1024  # connections that nobody has taken yet
_MOST_DESCRIPTORS = 65536


class Keys(NamedTuple):
    """The two key pairs, as ZeroMQ writes them."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def new(cls) -> Keys:
        """Keys that nobody has."""
        return cls.of(secrets.token_bytes(32))

    @classmethod
    def of(cls, secret: bytes) -> Keys:
        """The keys of a secret: who has it can make them, both ends alike."""
        server, client = (z85.encode(hmac.digest(secret, role, hashlib.sha256)) for role in (b"server", b"client"))
        return cls(*(key.decode() for own in (server, client) for key in (zmq.curve_public(own), own)))


class Router:
    """The end that listens: one socket for all who connect."""

    def __init__(self, host: str, keys: Keys, port: int | None = None) -> None:
        """At `port`, or a free one; `zmq.ZMQError` if it cannot be had."""
        _make_room()
        self._context = zmq.Context()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=_OnlyKey(keys.client_public.encode())
        )
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_secretkey = keys.server_secret.encode()
        self.socket.curve_publickey = keys.server_public.encode()
        self.socket.router_handover = True  # a replacement takes over the place of the one that died
        self.socket.linger = 500
        self.socket.handshake_ivl = _HANDSHAKE_MS
        self.socket.maxmsgsize = _LONGEST_MESSAGE
        self.socket.backlog = _BACKLOG
        try:
            if port is None:
                port = self.socket.bind_to_random_port(f"tcp://{host}")
            else:
                self.socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError:
            self.close()
            raise
        self.address = f"tcp://{host}:{port}"

    def receive(self) -> tuple[bytes, bytes] | None:
        """Who speaks, and what; None if nobody does now, or it makes no sense."""
        try:
            identity, data = self.socket.recv_multipart(zmq.NOBLOCK)
        except (zmq.Again, ValueError):
            return None
        return identity, data

    def send(self, identity: bytes, data: bytes) -> None:
        """To one who connected; one who is gone is no error here."""
        self.socket.send_multipart([identity, data])

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()
        self._authenticator.stop()
        self._context.term()


class Dealer:
    """The end that connects. Used by one thread at a time."""

    def __init__(self, address: str, identity: bytes, server_public: str, public: str, secret: str) -> None:
        _make_room()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = identity
        self._socket.curve_serverkey = server_public.encode()
        self._socket.curve_publickey = public.encode()
        self._socket.curve_secretkey = secret.encode()
        self._socket.linger = 2000
        self._socket.connect_timeout = _CONNECT_MS
        self._socket.connect(address)

    def send(self, data: bytes) -> None:
        """To the end that listens."""
        self._socket.send(data)

    def receive(self, timeout_s: float, *wakes: int) -> bytes | None:
        """What comes next, or None after `timeout_s`, or as soon as one of the descriptors `wakes` can be read."""
        poller = zmq.Poller()
        for source in (self._socket, *wakes):
            poller.register(source, zmq.POLLIN)
        if self._socket not in dict(poller.poll(int(timeout_s * 1000))):
            return None
        return self._socket.recv()

    def close(self) -> None:
        """Give what was sent a moment to leave, then disconnect."""
        self._socket.close()
        self._context.term()


class _OnlyKey:
    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """ZeroMQ asks whether a client with this key may connect."""
        del domain
        return key == self._public_key


def _make_room() -> None:
    """Let this process open as many descriptors as the system allows it to.

    ZeroMQ here and gloo in the workers take every connection first and ask who it is later. Without a descriptor left,
    ZeroMQ turns in circles and gloo ends the process; many systems start with a limit of 1024 and allow far more.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _MOST_DESCRIPTORS)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
