"""The control channel: short messages between the coordinator and each worker, over ZeroMQ with CURVE keys.

Here: the messages, the coordinator's end and a worker's. Not here: the sockets and their keys (`curve.py`), what
anybody decides on receiving a message (`coordinator/`, `workers/`), and bulk data (`collective.py`).

Messages are MessagePack and decode into the types below or not at all: nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from syncline.comms.curve import Dealer, Keys, Router

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
    "RunFiles",
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


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where the files of a run are."""

    payload_path: str
    run_dir: str
    checkpoint_path: str | None
    """What to go on from, if this is not the beginning."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """All that a new process needs to join a run: who it is, and how to reach and convince the coordinator."""

    rank: int
    life: int = 0
    """How many processes have had this rank before: more than none for one that replaces another."""
    host: str = "127.0.0.1"
    """The address at which the others reach this process, and at which it listens."""
    is_elsewhere: bool = False
    """Whether its machine is another one than the driver's: other paths, other processes."""
    files: RunFiles | None = None
    """Where this process finds the files of the run, if not where the driver does."""
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
    files: RunFiles
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


class ControlServer:
    """The coordinator's end: one socket for all workers."""

    def __init__(self, host: str) -> None:
        self._keys = Keys.new()
        self._router = Router(host, self._keys)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._router.address

    def ticket(self, rank: int, life: int = 0) -> Ticket:
        """What the worker of this rank needs to join."""
        return Ticket(
            rank=rank,
            life=life,
            address=self.address,
            server_key=self._keys.server_public,
            public_key=self._keys.client_public,
            secret_key=self._keys.client_secret,
        )

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._router.socket

    def receive(self) -> FromWorker | None:
        """The next message, or None if there is none now or it makes no sense."""
        try:
            received = self._router.receive()
            return None if received is None else _from_worker.decode(received[1])
        except (ValueError, msgspec.DecodeError, RecursionError):
            return None

    def send(self, rank: int, message: ToWorker) -> None:
        """To one worker; a worker that is gone is no error here, its death is reported by the engine."""
        self._router.send(_identity(rank), _encoder.encode(message))

    def close(self) -> None:
        """Stop listening."""
        self._router.close()


class ControlClient:
    """A worker's end. Used by one thread at a time."""

    def __init__(self, ticket: Ticket) -> None:
        self._dealer = Dealer(
            ticket.address, _identity(ticket.rank), ticket.server_key, ticket.public_key, ticket.secret_key
        )

    def send(self, message: FromWorker) -> None:
        """To the coordinator."""
        self._dealer.send(_encoder.encode(message))

    def receive(self, timeout_s: float, wake: int | None = None) -> ToWorker | None:
        """The next message, or None after `timeout_s`, or as soon as the descriptor `wake` can be read."""
        received = self._dealer.receive(timeout_s, *(() if wake is None else (wake,)))
        return None if received is None else _to_worker.decode(received)

    def close(self) -> None:
        """Give what was sent a moment to leave, then disconnect."""
        self._dealer.close()


def _identity(rank: int) -> bytes:
    return b"worker-%d" % rank
