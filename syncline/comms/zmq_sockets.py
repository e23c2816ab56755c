"""ZeroMQ sockets that only processes of a run can use: authenticated and encrypted with CURVE keys.

Here: the keys, `Router`, which many processes connect to, and `Dealer`, which connects. Not here: the messages
(`control.py`, `engines/`).

There are two key pairs, one for the listening end and one that all clients share. Only a process that was given the
client pair can connect, and all traffic is encrypted. A connection without the key costs a descriptor for a few
seconds, and `accept_guard.py` limits how many there are.

Keys that both ends derive from a secret are derived with scrypt. A program that records a handshake can check guesses
of the secret by itself, and people choose secrets that can be guessed: scrypt makes each guess cost 16 MB and tens of
milliseconds, instead of a microsecond.
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

from syncline.comms.accept_guard import AcceptGuard

_CONNECT_MS = 2000  # then again: after a network partition, the kernel would wait longer with each attempt
_HANDSHAKE_MS = 5000  # later handshakes are dropped; ZeroMQ clients retry by themselves
_LONGEST_MESSAGE = 4 * 1024 * 1024  # longer messages end the connection; anyone may send that much
_BACKLOG = 1024  # connections that were not accepted yet
_MOST_DESCRIPTORS = 65536
_SALT = b"syncline-keys-1"  # the ends have nothing in common but the secret, so the salt cannot be random
_SCRYPT_N = 2**14  # with r=8: 16 MB


class Keys(NamedTuple):
    """The two key pairs, in ZeroMQ's text format."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def new(cls) -> Keys:
        return cls._of_random(secrets.token_bytes(32))

    @classmethod
    def of(cls, secret: bytes) -> Keys:
        """The keys derived from a secret that a person may have chosen, the same on both ends."""
        return cls._of_random(hashlib.scrypt(secret, salt=_SALT, n=_SCRYPT_N, r=8, p=1, dklen=32))

    @classmethod
    def _of_random(cls, seed: bytes) -> Keys:
        server, client = (z85.encode(hmac.digest(seed, role, hashlib.sha256)) for role in (b"server", b"client"))
        return cls(*(key.decode() for own in (server, client) for key in (zmq.curve_public(own), own)))


class Router:
    """The listening end: one socket for all clients."""

    def __init__(self, host: str, keys: Keys, port: int | None = None) -> None:
        """Listen at `port`, or at a free one; `zmq.ZMQError` if the port is taken."""
        _raise_descriptor_limit()
        self._guard: AcceptGuard | None = None
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
        self.socket.router_handover = True  # a replacement takes over the identity of the failed process
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
        self._guard = AcceptGuard(port, _HANDSHAKE_MS / 1000)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message with its sender's identity; None if there is none, or it is malformed."""
        try:
            identity, data = self.socket.recv_multipart(zmq.NOBLOCK)
        except (zmq.Again, ValueError):
            return None
        return identity, data

    def send(self, identity: bytes, data: bytes) -> None:
        """To one client; dropped if it has disconnected."""
        self.socket.send_multipart([identity, data])

    def close(self) -> None:
        self.socket.close()
        if self._guard is not None:
            self._guard.close()
        self._authenticator.stop()
        self._context.term()


class Dealer:
    """The connecting end. Used by one thread at a time."""

    def __init__(self, address: str, identity: bytes, server_public: str, public: str, secret: str) -> None:
        _raise_descriptor_limit()
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
        self._socket.send(data)

    def receive(self, timeout_s: float, *wakes: int) -> bytes | None:
        """The next message; None after `timeout_s`, or as soon as one of the descriptors `wakes` is readable."""
        poller = zmq.Poller()
        for source in (self._socket, *wakes):
            poller.register(source, zmq.POLLIN)
        if self._socket not in dict(poller.poll(int(timeout_s * 1000))):
            return None
        return self._socket.recv()

    def close(self, *, waits: bool = True) -> None:
        """Wait shortly for unsent messages to leave, unless no one is there to take them, then disconnect."""
        self._socket.close(None if waits else 0)
        self._context.term()


class _OnlyKey:
    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by ZeroMQ: whether a client with this key may connect."""
        del domain
        return key == self._public_key


def _raise_descriptor_limit() -> None:
    """Raise this process's limit of open descriptors as far as the system allows.

    ZeroMQ here accepts every connection before it authenticates it, and so does gloo in the workers while a group
    forms. Out of descriptors, ZeroMQ busy-waits and gloo ends the process; many systems start with a soft limit of 1024
    and allow far more.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _MOST_DESCRIPTORS)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
