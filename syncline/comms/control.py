"""The control channel: short messages between the coordinator and each worker, over ZeroMQ with CURVE keys.

Here: the messages, the server's and the client's socket. Not here: what anybody decides on receiving one
(`coordinator/`, `workers/`), and bulk data (`collective.py`).

A run makes two key pairs; only who was handed the workers' key pair gets through, and all traffic is encrypted.
Messages are MessagePack and decode into the types below or not at all: nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq
import zmq.auth.thread

__all__ = [
    "Abort",
    "ControlClient",
    "ControlServer",
    "Events",
    "Failed",
    "Finished",
    "FromWorker",
    "Hello",
    "Meet",
    "MeetingCall",
    "ServerAddresses",
    "ServerReady",
    "ServersRequest",
    "StoreAddress",
    "StoreRequest",
    "Stop",
    "Ticket",
    "ToWorker",
    "Welcome",
]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """All that a new process needs to join a run: who it is, and how to reach and convince the coordinator."""

    rank: int
    address: str
    server_key: str
    public_key: str
    secret_key: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker's process is up."""

    rank: int
    pid: int


class Events(msgspec.Struct, frozen=True, tag=True):
    """Telemetry, and with it the sign that the worker lives; `step` shows whether its loop advances."""

    rank: int
    step: int
    events: list[dict[str, Any]]


class StoreRequest(msgspec.Struct, frozen=True, tag=True):
    """A worker needs the store of torch.distributed."""

    rank: int


class MeetingCall(msgspec.Struct, frozen=True, tag=True):
    """A worker has something to agree on with all the others, who are at other steps."""

    rank: int
    number: int


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """A parameter server listens at `address`."""

    rank: int
    address: str


class ServersRequest(msgspec.Struct, frozen=True, tag=True):
    """A worker needs the addresses of the parameter servers."""

    rank: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A worker has done its part; the summary comes from rank 0."""

    rank: int
    stopped_early: bool
    summary: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot go on. `kind` is the exception's class name, `consequence` says that a peer failed before."""

    rank: int
    kind: str
    message: str
    traceback: str
    step: int
    samples: list[int]
    consequence: bool


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's answer to Hello: everything that was decided, nothing to be derived again."""

    plan: dict[str, Any]
    payload_path: str
    run_dir: str
    checkpoint_path: str | None
    control_segment: str | None
    python_path: list[str]
    working_dir: str
    secret: str
    """What a worker shows to a parameter server, and a server to a worker."""


class StoreAddress(msgspec.Struct, frozen=True, tag=True):
    """Where the store listens."""

    host: str
    port: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Meeting `number` is called."""

    number: int


class ServerAddresses(msgspec.Struct, frozen=True, tag=True):
    """Where the parameter servers listen, in the order of their parts."""

    addresses: list[str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Agree with the others on a step, save, and end there."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Another worker is gone: give up the exchange in progress."""

    reason: str


FromWorker = Hello | Events | StoreRequest | MeetingCall | ServerReady | ServersRequest | Finished | Failed
ToWorker = Welcome | StoreAddress | Meet | ServerAddresses | Stop | Abort

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class ControlServer:
    """The coordinator's end: one socket for all workers."""

    def __init__(self, host: str) -> None:
        self._context = zmq.Context()
        server_public, server_secret = zmq.curve_keypair()
        worker_public, worker_secret = zmq.curve_keypair()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_OnlyKey(worker_public))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret
        self._socket.curve_publickey = server_public
        self._socket.router_handover = True  # a replacement takes over the place of the worker that died
        self._socket.linger = 500
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._keys = (server_public.decode(), worker_public.decode(), worker_secret.decode())
        self.address = f"tcp://{host}:{port}"

    def ticket(self, rank: int) -> Ticket:
        """What the worker of this rank needs to join."""
        server, public, secret = self._keys
        return Ticket(rank=rank, address=self.address, server_key=server, public_key=public, secret_key=secret)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._socket

    def receive(self) -> FromWorker | None:
        """The next message, or None if there is none now or it makes no sense."""
        try:
            _identity, data = self._socket.recv_multipart(zmq.NOBLOCK)
            return _from_worker.decode(data)
        except (zmq.Again, ValueError, msgspec.DecodeError, RecursionError):
            return None

    def send(self, rank: int, message: ToWorker) -> None:
        """To one worker; a worker that is gone is no error here, its death is reported by the engine."""
        self._socket.send_multipart([_identity(rank), _encoder.encode(message)])

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._authenticator.stop()
        self._context.term()


class ControlClient:
    """A worker's end. Used by one thread at a time."""

    def __init__(self, ticket: Ticket) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = _identity(ticket.rank)
        self._socket.curve_serverkey = ticket.server_key.encode()
        self._socket.curve_publickey = ticket.public_key.encode()
        self._socket.curve_secretkey = ticket.secret_key.encode()
        self._socket.linger = 2000
        self._socket.connect(ticket.address)

    def send(self, message: FromWorker) -> None:
        """To the coordinator."""
        self._socket.send(_encoder.encode(message))

    def receive(self, timeout_s: float) -> ToWorker | None:
        """The next message, or None after `timeout_s`."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return _to_worker.decode(self._socket.recv())

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


def _identity(rank: int) -> bytes:
    return b"worker-%d" % rank
