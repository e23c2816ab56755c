"""The messages between workers and parameter servers. MessagePack; data decodes into these types or not at all.

Bulk data (gradients, parameters, rows, pickled optimizers) is not part of a message: it follows the message, or lies in
the shared buffer (`comms/framing.py`). Each message's docstring names its bulk.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Spans = list[tuple[int, int]]


class Connect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message on a connection. A new `session` is a new process for that rank: its request ids restart."""

    rank: int
    size: int
    session: int
    is_prefetch: bool
    """This connection only prefetches; its end does not mean that the worker has ended."""
    view: int = 0
    """Grows with each change of membership; servers disconnect workers of earlier views."""


class Offer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A shared buffer; the reply says whether the server could attach to it."""

    id: int
    address: str
    token: bytes
    size_bytes: int


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Prepare for training. Bulk, from rank 0 in mode "start": the shard's parameters, the optimizer, its state."""

    id: int
    rule: str
    rate: float
    clock: int
    mode: Literal["start", "join", "keep"]
    """See `ParameterServers.begin`."""
    shapes: list[tuple[int, ...]]
    sparse: list[bool]
    groups: list[list[int]]
    parts: tuple[int, int, int]
    """How many bytes of bulk are parameters, optimizer and state."""


class GradientFormat(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The format of a gradient's bulk: first the rows (int64), then the values."""

    rows: list[tuple[int, int]]
    """(chunk, number of its rows): these chunks travel by rows."""
    spans: Spans | None
    """Of the other chunks, only these ranges of the shard travel."""
    codec: tuple[str, list[float]] | None
    """How the values are encoded: the codec's class and its settings."""
    numel: int
    """The number of values."""


class Push(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A gradient to apply on arrival."""

    id: int
    clock: int
    weight: float
    read_version: int
    update: GradientFormat
    hyperparameters: list[dict[str, Any]] | None


class Collect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A gradient to apply together with all workers'. The reply comes then, with parameters as bulk if wanted."""

    id: int
    clock: int
    weight: float
    piggybacked: list[float]
    clip_norm: float | None
    wants_parameters: bool
    update: GradientFormat
    hyperparameters: list[dict[str, Any]] | None


class Elastic(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Bulk: the worker's values of this shard. The reply's: how far the worker moves."""

    id: int
    clock: int = 0
    """How many steps the worker has finished."""


class Tick(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker's clock, without a gradient. No reply."""

    clock: int


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The parameters, or some ranges of the shard, once the worker's request `after` has been applied."""

    id: int
    after: int
    spans: Spans | None


class Gate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply as soon as no worker is more than `bound` behind `clock`. Replaces this worker's earlier one."""

    id: int
    clock: int
    bound: int


class AppliedSteps(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How many steps of each worker of the previous view the parameters contain; see `Reply.applied_steps`."""

    id: int


class SaveState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply with the shard's state as bulk."""

    id: int


class Goodbye(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker has finished training."""

    id: int


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to request `to`."""

    to: int
    version: int = 0
    """Of the parameters, after the request was handled."""
    slowest: int = 0
    """The slowest worker's clock."""
    staleness: int = 0
    """Of the update that was pushed; -1 if there was nothing to apply in this shard."""
    clock: int = 0
    """To Begin: where this worker's clock starts."""
    accepted: bool = True
    """To Offer: whether the memory can be used."""
    piggybacked: list[float] = []
    """To Collect: their weighted sum."""
    applied_steps: dict[int, int] | None = None
    """To AppliedSteps: by worker; None if this server has no parameters."""


class ErrorReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request `to` failed; `is_peer_failure` if the cause is another worker's failure."""

    to: int
    message: str
    is_peer_failure: bool


FromWorker = (
    Connect | Offer | Begin | Push | Collect | Elastic | Tick | Pull | Gate | AppliedSteps | SaveState | Goodbye
)
FromServer = Reply | ErrorReply

_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)

decode_from_worker = _from_worker.decode
decode_from_server = _from_server.decode
