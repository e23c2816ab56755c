"""Messages between a node agent and the driver.

Here: the messages. They are MessagePack over CURVE sockets (`comms/zmq_sockets.py`) and
decode into these types or not at all. Beside that channel an agent keeps a *liveness connection*, plain TCP, on
which it identifies itself once. Then both ends send a byte now and then: when a process is stopped, it sends none, and
when it ends, its kernel closes the connection.
"""

from __future__ import annotations

import msgspec

from syncline.comms.control import LaunchSpec

PROTOCOL = 3
"""Increased with every change of these messages."""
BEAT = b"."
"""What goes over the liveness connection now and then."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to connect to the driver."""

    address: str
    """host:port"""
    secret: str


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The node of an agent."""

    machine: str
    """The same for processes that share a kernel, its processes and its network, whatever the host is called."""
    pid: int
    """The process of the agent."""
    host: str
    """Its name, for people."""
    address: str
    """At which other nodes reach the processes there."""
    cores: int
    memory_available_bytes: int
    no_shared_memory_because: str | None
    gpus: list[str]
    """The CUDA devices that its workers see, by index or UUID."""
    versions: dict[str, str]
    """Of the packages that must be the same on all nodes."""


class Register(msgspec.Struct, frozen=True, tag=True):
    """An agent has started. `slot`: which of the engine's slots it was started for, if for a certain one."""

    protocol: int
    name: str
    node: NodeInfo
    slot: int | None


class AgentHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent by both ends every second."""


class FileChunk(msgspec.Struct, frozen=True, tag=True):
    """A part of a file, by its name in the run directory, for a node that does not share the driver's file system."""

    name: str
    offset: int
    data: bytes
    is_last: bool


class FileRemoved(msgspec.Struct, frozen=True, tag=True):
    """A file of the run was deleted."""

    name: str


class MissingFiles(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot be started yet: this node does not share the driver's file system."""

    worker_id: int
    life: int


class WorkerExited(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has ended."""

    worker_id: int
    life: int
    pid: int
    code: int | None
    signal: int | None
    reason: str = ""


class AgentProblem(msgspec.Struct, frozen=True, tag=True):
    """Something went wrong with processes of the agent's own, as a sentence for the user."""

    message: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The agent is accepted; it opens the `liveness` connection (host:port) and sends `token` there."""

    liveness: str
    token: bytes


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The agent is rejected."""

    reason: str


class LaunchWorker(msgspec.Struct, frozen=True, tag=True):
    """Start a worker. `marker` is a file that exists on nodes that share the driver's file system.

    None: this node does not, and has been sent the files.
    """

    spec: LaunchSpec
    log: str
    marker: str | None


class KillWorkers(msgspec.Struct, frozen=True, tag=True):
    """Kill all workers of the agent, or one."""

    worker_id: int | None


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The run is over: end the workers and exit."""


FromAgent = Register | AgentHeartbeat | MissingFiles | WorkerExited | AgentProblem | FileChunk | FileRemoved
ToAgent = Accepted | Rejected | FileChunk | LaunchWorker | KillWorkers | AgentHeartbeat | Shutdown

_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)

encode = _encoder.encode
decode_from_agent = _from_agent.decode
decode_to_agent = _to_agent.decode
