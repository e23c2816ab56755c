"""The control channel: short messages between the coordinator and each worker, over ZeroMQ with CURVE keys.

Here: the messages, the coordinator's end and a worker's. Not here: the sockets and their keys (`zmq_sockets.py`), what
anybody decides on receiving a message (`coordinator/`, `workers/`), and bulk data (`collective.py`).

Messages are MessagePack and decode into the types below or not at all: nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from syncline.comms.zmq_sockets import Dealer, Keys, Router


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the files of a run."""

    task_path: str
    run_dir: str
    checkpoint_path: str | None
    """The checkpoint to resume from, if any."""


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a new process needs to join a run: who it is, and how to reach and convince the coordinator."""

    worker_id: int
    life: int = 0
    """How many processes have had this id before: more than none for one that replaces another."""
    host: str = "127.0.0.1"
    """The address at which the others reach this process, and at which it listens."""
    is_remote: bool = False
    """Whether its machine is another one than the driver's: other paths, other processes."""
    files: RunFiles | None = None
    """Where this process finds the files of the run, if not where the driver does."""
    address: str
    """The coordinator's."""
    server_key: str
    public_key: str
    secret_key: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has started."""

    worker_id: int
    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker that was started later is ready to join the next View."""

    worker_id: int
    life: int


class Stranded(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot reach the other members of a View, and has received no newer View."""

    worker_id: int
    life: int
    view: int


class Events(msgspec.Struct, frozen=True, tag=True):
    """Telemetry events, also sent as a heartbeat; `step` shows whether the training loop advances.

    `waits`: the loop is waiting for other workers.
    """

    worker_id: int
    step: int
    events: list[dict[str, Any]]
    life: int = 0
    waits: bool = False


class LedgerLine(msgspec.Struct, frozen=True, tag=True):
    """A line of the sample ledger, as encoded by `data/ledger.py`."""

    worker_id: int
    line: bytes


class StoreRequest(msgspec.Struct, frozen=True, tag=True):
    """A worker needs the address of torch.distributed's store."""

    worker_id: int


class MeetingCall(msgspec.Struct, frozen=True, tag=True):
    """A worker calls a meeting to agree on something with workers that are at other steps."""

    worker_id: int
    view: int
    number: int


class GroupCreated(msgspec.Struct, frozen=True, tag=True):
    """A worker's script creates a process group of torch.distributed of its own, in this View."""

    worker_id: int
    life: int
    view: int


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """A parameter server listens at `address`."""

    worker_id: int
    address: str
    life: int = 0


class ServersRequest(msgspec.Struct, frozen=True, tag=True):
    """A worker needs the addresses of the parameter servers."""

    worker_id: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A worker has completed its part."""

    worker_id: int
    stopped_early: bool
    summary: dict[str, Any]
    life: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker failed with an exception. `kind` is its class name; `consequence`: it followed from another failure.

    `is_first_step`: the worker had not completed a step, so a replacement would likely fail, too.
    """

    worker_id: int
    kind: str
    message: str
    traceback: str
    step: int
    samples: list[int]
    consequence: bool
    life: int = 0
    is_first_step: bool = True
    code: str | None = None
    """The `code` and `facts` of one of Syncline's own errors."""
    facts: dict[str, Any] = {}


class ViewOf(msgspec.Struct, frozen=True):
    """The members of a View by worker_id; a member's rank is its position among them."""

    number: int
    members: list[int]
    control_segment: str | None
    """The shared-memory segment for the members' exchanges; None if they use the network."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's answer to Hello: the plan, and what a worker needs to join."""

    plan: dict[str, Any]
    files: RunFiles
    view: ViewOf | None
    """None for a process that was started later: it sends Ready, and receives a NewView."""
    driver_pid: int
    python_path: list[str]
    working_dir: str
    secret: str
    """With which workers and parameter servers authenticate each other."""
    session: str
    """Identifies one lifetime of the driver: a resumed run has several sessions."""
    restarts_together: bool = False
    """Whether the script trains with torch.distributed itself: then it starts when all workers are there."""
    epoch: int = 0
    """The epoch in which the run is, at least."""


class NewView(msgspec.Struct, frozen=True, tag=True):
    """A worker failed, joins or leaves: abort the exchange in progress and continue in this View."""

    view: ViewOf


class Release(msgspec.Struct, frozen=True, tag=True):
    """To a parameter server: the workers are done."""


class StoreAddress(msgspec.Struct, frozen=True, tag=True):
    """The address of torch.distributed's store."""

    host: str
    port: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Meeting `number` of a View begins."""

    view: int
    number: int


class ServerAddresses(msgspec.Struct, frozen=True, tag=True):
    """Where the parameter servers listen, in the order of their parts."""

    addresses: list[str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Agree with the other workers on a step, save and stop there."""

    signal: str = ""
    """The signal that asked for it, such as SIGTERM, if one did."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The run has failed or is complete: abort the exchange in progress, and exit."""

    reason: str
    code: str | None = None
    """That of the error, if it is one of Syncline's own."""


FromWorker = (
    Hello
    | Ready
    | Stranded
    | Events
    | LedgerLine
    | StoreRequest
    | MeetingCall
    | GroupCreated
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
        return self._router.address

    def launch_spec(self, worker_id: int, life: int = 0) -> LaunchSpec:
        """What worker `worker_id` needs to join."""
        return LaunchSpec(
            worker_id=worker_id,
            life=life,
            address=self.address,
            server_key=self._keys.server_public,
            public_key=self._keys.client_public,
            secret_key=self._keys.client_secret,
        )

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._router.socket

    def receive(self) -> FromWorker | None:
        """The next message, or None if there is none now or it makes no sense."""
        try:
            received = self._router.receive()
            return None if received is None else _from_worker.decode(received[1])
        except (ValueError, msgspec.DecodeError, RecursionError):
            return None

    def send(self, worker_id: int, message: ToWorker) -> None:
        """To one worker; a worker that is gone is no error here, its death is reported by the engine."""
        self._router.send(_identity(worker_id), _encoder.encode(message))

    def close(self) -> None:
        self._router.close()


class ControlClient:
    """A worker's end. Used by one thread at a time."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._dealer = Dealer(
            spec.address, _identity(spec.worker_id), spec.server_key, spec.public_key, spec.secret_key
        )

    def send(self, message: FromWorker) -> None:
        self._dealer.send(_encoder.encode(message))

    def receive(self, timeout_s: float, wake: int | None = None) -> ToWorker | None:
        """The next message, or None after `timeout_s`, or as soon as the descriptor `wake` can be read."""
        received = self._dealer.receive(timeout_s, *(() if wake is None else (wake,)))
        return None if received is None else _to_worker.decode(received)

    def close(self, *, waits: bool = True) -> None:
        """Give what was sent a moment to leave, unless the coordinator is gone, then disconnect."""
        self._dealer.close(waits=waits)


def _identity(worker_id: int) -> bytes:
    return b"worker-%d" % worker_id
