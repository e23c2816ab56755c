"""What workers and servers of parameters say to each other. MessagePack; decodes into these types or not at all.

Numbers in bulk (gradients, parameters, rows, pickled optimisers) are no part of a message: they follow it, or lie in a
mailbox (`connection.py`). Which bulk belongs to which message is said with each.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "Begin",
    "Collect",
    "Elastic",
    "Failed",
    "FromServer",
    "FromWorker",
    "Gate",
    "Goodbye",
    "Hello",
    "Offer",
    "Pull",
    "Push",
    "Reply",
    "SaveState",
    "Tick",
    "decode_from_server",
    "decode_from_worker",
    "encode",
]

Spans = list[tuple[int, int]]


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Who is there. A new `session` is a new life of that worker: its count of requests starts again."""

    rank: int
    size: int
    session: int
    is_ahead: bool
    """This connection only fetches ahead; that it ends says nothing about the worker."""
    view: int = 0
    """Each time the workers change, a larger number; whoever belongs to an earlier one has no business any more."""


class Offer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Memory to share; the reply says whether the server could reach it."""

    id: int
    address: str
    token: bytes
    size_bytes: int


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start anew. From rank 0, bulk: the part's parameters, the optimiser's shell, its state. From others: none."""

    id: int
    rule: str
    rate: float
    clock: int
    joins: bool
    """Take part in what has begun before, in the place of a worker that was lost."""
    shapes: list[tuple[int, ...]]
    sparse: list[bool]
    groups: list[list[int]]
    parts: tuple[int, int, int]
    """How many bytes of bulk are parameters, shell and state."""
    keeps: bool = False
    """Go on with the parameters and the optimiser that are there; from rank 0, too, no bulk."""


class Update(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the bulk of a gradient is to be read: first the rows (int64), then the values."""

    rows: list[tuple[int, int]]
    """(piece, how many of its rows): these pieces travel by rows."""
    spans: Spans | None
    """Of the other pieces, only these ranges of the part travel."""
    codec: tuple[str, list[float]] | None
    """How the values are encoded: the codec's class and its settings."""
    numel: int
    """How many values there are."""


class Push(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A gradient to be applied on arrival."""

    id: int
    clock: int
    weight: float
    read_version: int
    update: Update
    settings: list[dict[str, Any]] | None


class Collect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A gradient to be applied with everybody's. The reply comes then, with parameters as bulk if wanted."""

    id: int
    clock: int
    weight: float
    riders: list[float]
    clip_norm: float | None
    wants_parameters: bool
    update: Update
    settings: list[dict[str, Any]] | None


class Elastic(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Bulk: where the worker is in this part. The reply's: how far it is to move."""

    id: int
    clock: int = 0
    """How many steps have made it what it is."""


class Tick(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker's clock, without a gradient. No reply."""

    clock: int


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The parameters, or some ranges of the part, once the worker's request `after` has been applied."""

    id: int
    after: int
    spans: Spans | None


class Gate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply as soon as nobody is more than `bound` behind `clock`. Takes the place of this worker's earlier one."""

    id: int
    clock: int
    bound: int


class Earlier(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How far the workers of the View before had come; see `Reply.reached`."""

    id: int


class SaveState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply with the shard's state as bulk."""

    id: int


class Goodbye(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker has done its part."""

    id: int


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To request `to`."""

    to: int
    version: int = 0
    """Of the parameters, after whatever was asked for."""
    slowest: int = 0
    """The slowest worker's clock."""
    staleness: int = 0
    """Of the update that was pushed; -1 if there was nothing to apply in this part."""
    clock: int = 0
    """To Begin: where this worker's clock starts."""
    accepted: bool = True
    """To Offer: whether the memory can be used."""
    riders: list[float] = []
    reached: dict[int, int] | None = None
    """To Earlier: of which worker how many steps are in the parameters; None if the parameters are not there."""
    """To Collect: their weighted sum."""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request `to` could not be met; `is_peers_fault` if another worker is missing."""

    to: int
    message: str
    is_peers_fault: bool


FromWorker = Hello | Offer | Begin | Push | Collect | Elastic | Tick | Pull | Gate | Earlier | SaveState | Goodbye
FromServer = Reply | Failed

encode = msgspec.msgpack.Encoder().encode
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def decode_from_worker(data: bytes | bytearray | memoryview) -> FromWorker:
    """At the server."""
    return _from_worker.decode(data)


def decode_from_server(data: bytes | bytearray | memoryview) -> FromServer:
    """At the worker."""
    return _from_server.decode(data)
