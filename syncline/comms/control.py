"""The control channel: short messages between the coordinator and each worker, over ZeroMQ with CURVE keys.

Here: the messages, the server's and the client's socket. Not here: what anybody decides on receiving one
(`coordinator/`, `workers/`), and bulk data (`collective.py`).

A run makes two key pairs; only who was handed the workers' key pair gets through, and all traffic is encrypted.
Messages are MessagePack and decode into the types below or not at all: nothing is unpickled. Who connects and has no
key costs a descriptor, for a few seconds.
"""

from __future__ import annotations

import resource
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
    "LedgerLine",
    "Meet",
    "MeetingCall",
    "NewView",
    "Ready",
    "Release",
    "ServerAddresses",
    "ServerReady",
    "ServersRequest",
    "StoreAddress",
    "Stranded",
    "StoreRequest",
    "Stop",
    "Ticket",
    "ToWorker",
    "ViewOf",
    "Welcome",
]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """All that a new process needs to join a run: who it is, and how to reach and convince the coordinator."""

    rank: int
    life: int = 0
    """How many processes have had this rank before: more than none for one that replaces another."""
    host: str = "127.0.0.1"
    """The address at which the others reach this process, and at which it listens."""
    address: str
    """The coordinator's."""
    server_key: str
    public_key: str
    secret_key: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker's process is up."""

    rank: int
    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker that was started later can take part as soon as it is told of a View with it."""

    rank: int
    life: int


class Stranded(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot reach the others of a View any more, and was not told of another."""

    rank: int
    life: int
    view: int


class Events(msgspec.Struct, frozen=True, tag=True):
    """Telemetry, and with it the sign that the worker lives; `step` shows whether its loop advances.

    `waits`: it is waiting for others just now.
    """

    rank: int
    step: int
    events: list[dict[str, Any]]
    life: int = 0
    waits: bool = False


class LedgerLine(msgspec.Struct, frozen=True, tag=True):
    """A line for the ledger of samples, as `data/ledger.py` writes it."""

    rank: int
    line: bytes


class StoreRequest(msgspec.Struct, frozen=True, tag=True):
    """A worker needs the store of torch.distributed."""

    rank: int


class MeetingCall(msgspec.Struct, frozen=True, tag=True):
    """A worker has something to agree on with all the others, who are at other steps."""

    rank: int
    view: int
    number: int


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """A parameter server listens at `address`."""

    rank: int
    address: str
    life: int = 0


class ServersRequest(msgspec.Struct, frozen=True, tag=True):
    """A worker needs the addresses of the parameter servers."""

    rank: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A worker has done its part; the summary comes from rank 0."""

    rank: int
    stopped_early: bool
    summary: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot go on. `kind` is the exception's class name, `consequence` says that a peer failed before.

    `is_first_step`: it had not done a single step, so another one in its place would hardly do better.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    step: int
    samples: list[int]
    consequence: bool
    life: int = 0
    is_first_step: bool = True


class ViewOf(msgspec.Struct, frozen=True):
    """Who takes part from now on, by number; a member's rank is its place among them."""

    number: int
    members: list[int]
    control_segment: str | None
    """Where shared memory for the members' exchanges is; None if they exchange otherwise."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's answer to Hello: everything that was decided, nothing to be derived again."""

    plan: dict[str, Any]
    payload_path: str
    run_dir: str
    checkpoint_path: str | None
    view: ViewOf | None
    """None for a process that was started later: it says when it is ready, and is told then."""
    driver_pid: int
    python_path: list[str]
    working_dir: str
    secret: str
    """What a worker shows to a parameter server, and a server to a worker."""
    session: str
    """Names what is done from the driver's start to its end: a run that is resumed has several."""


class NewView(msgspec.Struct, frozen=True, tag=True):
    """Somebody was lost, joins or leaves: give up the exchange in progress, and go on in this View."""

    view: ViewOf


class Release(msgspec.Struct, frozen=True, tag=True):
    """To a server of parameters: the workers are done."""


class StoreAddress(msgspec.Struct, frozen=True, tag=True):
    """Where the store listens."""

    host: str
    port: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Meeting `number` of a View is called."""

    view: int
    number: int


class ServerAddresses(msgspec.Struct, frozen=True, tag=True):
    """Where the parameter servers listen, in the order of their parts."""

    addresses: list[str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Agree with the others on a step, save, and end there."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The run has failed: give up the exchange in progress, and end."""

    reason: str


FromWorker = (
    Hello
    | Ready
    | Stranded
    | Events
    | LedgerLine
    | StoreRequest
    | MeetingCall
    | ServerReady
    | ServersRequest
    | Finished
    | Failed
)
ToWorker = Welcome | NewView | StoreAddress | Meet | ServerAddresses | Stop | Release | Abort

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

_CONNECT_MS = 2000  # then anew: the kernel would wait longer each time for an answer from a network that was cut
_HANDSHAKE_MS = 5000  # who is late is cut off; ZeroMQ lets a worker try again by itself
_LONGEST_MESSAGE = 4 * 1024 * 1024  # what is longer ends the connection; a stranger may send that much, too
_BACKLOG = 1024  # connections that nobody has taken yet
_MOST_DESCRIPTORS = 65536


class ControlServer:
    """The coordinator's end: one socket for all workers."""

    def __init__(self, host: str) -> None:
        _make_room()
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
        self._socket.handshake_ivl = _HANDSHAKE_MS
        self._socket.maxmsgsize = _LONGEST_MESSAGE
        self._socket.backlog = _BACKLOG
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._keys = (server_public.decode(), worker_public.decode(), worker_secret.decode())
        self.address = f"tcp://{host}:{port}"

    def ticket(self, rank: int, life: int = 0) -> Ticket:
        """What the worker of this rank needs to join."""
        server, public, secret = self._keys
        return Ticket(
            rank=rank, life=life, address=self.address, server_key=server, public_key=public, secret_key=secret
        )

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
        _make_room()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = _identity(ticket.rank)
        self._socket.curve_serverkey = ticket.server_key.encode()
        self._socket.curve_publickey = ticket.public_key.encode()
        self._socket.curve_secretkey = ticket.secret_key.encode()
        self._socket.linger = 2000
        self._socket.connect_timeout = _CONNECT_MS
        self._socket.connect(ticket.address)

    def send(self, message: FromWorker) -> None:
        """To the coordinator."""
        self._socket.send(_encoder.encode(message))

    def receive(self, timeout_s: float, wake: int | None = None) -> ToWorker | None:
        """The next message, or None after `timeout_s`, or as soon as the descriptor `wake` can be read."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            poller.register(wake, zmq.POLLIN)
        if self._socket not in dict(poller.poll(int(timeout_s * 1000))):
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


def _make_room() -> None:
    """Let this process open as many descriptors as the system allows it to.

    ZeroMQ here and gloo in the workers take every connection first and ask who it is later. Without a descriptor left,
    ZeroMQ turns in circles and gloo ends the process; many systems start with a limit of 1024 and allow far more.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _MOST_DESCRIPTORS)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _identity(rank: int) -> bytes:
    return b"worker-%d" % rank
