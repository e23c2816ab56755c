"""The process around one shard: a loop that handles workers' requests, some of them with a delayed reply.

Here: `serve`. One thread and one selector, and no call blocks on a single worker: a worker that is slow to read or
write, or hangs, holds up no other. Not here: what a request does to the parameters (`shard.py`), how bytes travel
(`comms/listener.py`), and the supervision of servers (`coordinator/`).

Delayed replies:

    Begin      when all workers have sent it, so that none is still in the previous training
    Collect    when all gradients of the step have arrived
    Gate       when no worker is too far behind
    Pull       (a prefetch, on a connection of its own) when the worker's own pushes before it were applied
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from syncline.comms import listener
from syncline.comms.listener import Disconnected, Listener, listen
from syncline.comms.parameter_server import messages as m
from syncline.comms.parameter_server.chunks import chunks_in
from syncline.comms.parameter_server.gradient import Gradient
from syncline.comms.parameter_server.outgoing import CODECS
from syncline.comms.parameter_server.shard import RULES, Shard
from syncline.comms.serialize import bytes_to_tensor, dump_state, load_state
from syncline.comms.shared_buffer import SharedBuffer
from syncline.compute.partition import cut_rows
from syncline.errors import ConfigError

Connection: TypeAlias = listener.ServerConnection[m.FromWorker]
Frame: TypeAlias = listener.Frame[m.FromWorker]

_POLL_S = 0.1  # how often the loop checks whether it should stop
_MAX_UNAUTHENTICATED = 256  # connections at a time that have not authenticated, besides the workers'


@dataclass(frozen=True)
class Served:
    """What a server reports when it ends. Workers are given by rank."""

    finished: frozenset[int]
    """Workers that said goodbye."""
    failed: tuple[int, ...]
    """Workers that disconnected without a goodbye, in that order, except those that were replaced."""
    updates: int
    """How many were applied since the last `begin`."""
    staleness: dict[int, int]
    """How many updates had each staleness, since the last `begin`."""


def serve(
    host: str,
    secret: bytes,
    *,
    shard_index: int,
    shards: int,
    size: int,
    on_ready: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    on_worker_failed: Callable[[int], None] = lambda _: None,
) -> Served:
    """Hold shard `shard_index` of `shards` for `size` workers, until all have said goodbye or `should_stop()`.

    Listens on a free port of `host` and passes the address, "host:port", to `on_ready`. Calls `should_stop` at least
    five times a second, and `on_worker_failed` with the rank of each worker that disconnects without a goodbye; the
    others continue, and a replacement may join.
    """
    with listen(host) as socket, selectors.DefaultSelector() as selector:
        # All workers may connect at the same moment, each with a connection for requests and one for prefetching.
        acceptor = Listener(
            socket, secret, m.decode_from_worker, selector, max_unauthenticated=_MAX_UNAUTHENTICATED + 2 * size
        )
        loop = _Loop(selector, acceptor, shard_index, shards, size, on_worker_failed)
        port = socket.getsockname()[1]
        on_ready(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        try:
            next_check = 0.0
            while len(loop.finished) < loop.size:
                if (now := time.monotonic()) >= next_check:
                    next_check = now + _POLL_S
                    if should_stop():
                        break
                    acceptor.maintain()
                for key, events in selector.select(_POLL_S):
                    if key.data is acceptor:
                        acceptor.accept()
                    else:
                        loop.handle_events(key.data, events)
            loop.flush_goodbyes()
        finally:
            acceptor.close()
            for connection in list(loop.members):
                connection.close()
        shard = loop.shard
        return Served(
            frozenset(loop.finished),
            tuple(loop.failed_workers),
            shard.version - loop.first_version if shard else 0,
            dict(shard.staleness) if shard else {},
        )


@dataclass
class _Member:
    """The loop's record of a connection."""

    rank: int | None = None
    is_prefetch: bool = False
    session: int = 0
    said_goodbye: bool = False
    wants_write: bool = False
    """The selector watches for room in the kernel's send buffer."""


@dataclass
class _DelayedRequest:
    """A request whose reply is delayed."""

    connection: Connection
    message: Any
    bulk: Tensor


class _Loop:
    def __init__(
        self,
        selector: selectors.BaseSelector,
        acceptor: Listener[m.FromWorker],
        shard_index: int,
        shards: int,
        size: int,
        on_worker_failed: Callable[[int], None],
    ) -> None:
        self.selector, self.acceptor = selector, acceptor
        self.index, self.shards, self.size = shard_index, shards, size
        self.view = 0
        self.applied_steps: dict[int, int] | None = None  # of the workers of the previous view
        self.on_worker_failed = on_worker_failed
        self.shard: Shard | None = None
        self.first_version = 0
        self.members: dict[Connection, _Member] = {}
        self.sessions: dict[int, int] = {}
        self.finished: set[int] = set()
        self.failed_workers: list[int] = []
        self.begins: dict[int, _DelayedRequest] = {}
        self.collects: dict[int, _DelayedRequest] = {}
        self.gates: dict[int, _DelayedRequest] = {}
        self.pulls: list[_DelayedRequest] = []
        self.failed_pushes: dict[int, m.ErrorReply] = {}  # by rank, the last push that could not be applied

    # Connections

    def handle_events(self, connection: Connection, events: int) -> None:
        if connection not in self.members and self.acceptor.admit(connection):
            self.members[connection] = _Member()
        if events & selectors.EVENT_WRITE and connection in self.members:
            self._guarded(connection, connection.flush)
        if events & selectors.EVENT_READ and connection in self.members:
            self._guarded(connection, lambda: self._read(connection))

    def flush_goodbyes(self) -> None:
        """Send the last replies before the connections close."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            unsent = [p for p in self.members if p.has_more_to_send and self.members[p].said_goodbye]
            if not unsent:
                return
            self.selector.select(0.02)
            for connection in unsent:
                self._guarded(connection, connection.flush)

    def _guarded(self, connection: Connection, action: Callable[[], None]) -> None:
        try:
            action()
        except Disconnected:
            self._drop(connection)
        self._watch()

    def _watch(self) -> None:
        for connection, member in self.members.items():
            if member.wants_write != connection.has_more_to_send:
                member.wants_write = connection.has_more_to_send
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.wants_write else 0)
                self.selector.modify(connection, wanted, connection)

    def _drop(self, connection: Connection) -> None:
        member = self.members.pop(connection, None)
        if member is None:
            return
        self.selector.unregister(connection)
        connection.close()
        self.pulls = [w for w in self.pulls if w.connection is not connection]
        rank = member.rank
        if rank is None or member.is_prefetch or self.sessions.get(rank) != member.session:
            return
        for waiting in (self.begins, self.collects, self.gates):
            if rank in waiting and waiting[rank].connection is connection:
                del waiting[rank]
        if not member.said_goodbye:
            self.failed_workers.append(rank)
        self._leave(rank, "has finished" if member.said_goodbye else "failed")
        if not member.said_goodbye:
            self.on_worker_failed(rank)

    def _leave(self, rank: int, how: str) -> None:
        """A worker has finished or failed: release the workers that wait for it."""
        if self.shard is not None:
            self.shard.leave(rank)
        waiting, self.collects = self.collects, {}
        for other, request in waiting.items():
            if self.shard is not None:
                self.shard.withdraw(other)
            self._fail(
                request, f"Rank {rank} {how} before it sent its gradient, and rule 'collect' needs all of them.", True
            )
        self._open_gates()

    # Requests

    def _read(self, connection: Connection) -> None:
        frame = connection.read()
        if frame is None:
            return
        member = self.members[connection]
        if member.rank is None and not isinstance(frame.message, m.Connect):
            raise Disconnected("sent another message before Connect")
        try:
            self._handle(connection, member, frame)
        except Disconnected:
            raise
        except Exception as error:
            # A bad request must not end the training of the others, nor of the worker that sent it.
            to = getattr(frame.message, "id", 0)
            connection.send(m.ErrorReply(to, _describe(error), False))

    def _handle(self, connection: Connection, member: _Member, frame: Frame) -> None:
        message, bulk = frame
        match message:
            case m.Connect():
                self._greet(connection, member, message)
                return
            case m.Offer():
                connection.shared_buffer = SharedBuffer.attach(message.address, message.token, message.size_bytes)
                accepted, box = connection.shared_buffer is not None, connection.shared_buffer
                connection.shared_buffer = None  # the worker uses it after this reply
                connection.send(m.Reply(message.id, accepted=accepted))
                connection.shared_buffer = box
                return
        rank = member.rank
        assert rank is not None
        match message:
            case m.Begin():
                self._begin(_DelayedRequest(connection, message, bulk), rank)
                return
            case m.AppliedSteps():
                connection.send(m.Reply(message.id, applied_steps=self.applied_steps))
                return
            case m.Goodbye():
                member.said_goodbye = True
                self.finished.add(rank)
                self._leave(rank, "has finished")
                connection.send(m.Reply(message.id))
                return
        shard = self.shard
        if shard is None:
            raise ConfigError("This server has no parameters yet. Every worker must call begin first.")
        match message:
            case m.Push():
                self._push(_DelayedRequest(connection, message, bulk), rank, shard)
            case m.Collect():
                self._collect(_DelayedRequest(connection, message, bulk), rank, shard)
            case m.Elastic():
                self._copy_unsent()
                worker = bulk.view(torch.float32)
                shard.exchange(rank, message.id, worker, message.clock)
                connection.send(_reply(message.id, shard), [worker])
            case m.Tick():
                shard.progress.advance(rank, message.clock)
                self._open_gates()
            case m.Pull():
                self.pulls.append(_DelayedRequest(connection, message, bulk))
                self._answer_pulls()
            case m.Gate():
                if replaced := self.gates.pop(
                    rank, None
                ):  # the worker no longer waits for it, but each request has a reply
                    self._send(replaced.connection, _reply(replaced.message.id, shard))
                self.gates[rank] = _DelayedRequest(connection, message, bulk)
                self._open_gates()
            case m.SaveState():
                data = bytes_to_tensor(dump_state(shard.state()))
                connection.send(_reply(message.id, shard), [data])

    def _greet(self, connection: Connection, member: _Member, message: m.Connect) -> None:
        if message.view > self.view:
            self._change_view(message.view, message.size, connection)
        if message.view < self.view:
            raise Disconnected("belongs to an earlier view")
        if message.size != self.size or not 0 <= message.rank < self.size:
            reason = f"Rank {message.rank} of {message.size} connected, but this server is for {self.size} workers."
            connection.send(m.ErrorReply(0, reason, False))
            raise Disconnected(reason)
        member.rank, member.is_prefetch, member.session = message.rank, message.is_prefetch, message.session
        if message.is_prefetch:
            return
        before = [
            p for p, k in self.members.items() if k.rank == message.rank and not k.is_prefetch and p is not connection
        ]
        if self.sessions.get(message.rank) != message.session:
            self.sessions[message.rank] = message.session
            self.failed_pushes.pop(message.rank, None)
            if self.shard is not None:
                self.shard.progress.forget_requests(message.rank)
        for old in before:  # an earlier process of this rank, whose end was not noticed yet
            self._drop(old)
        self.finished.discard(message.rank)
        if message.rank in self.failed_workers:
            self.failed_workers.remove(message.rank)

    def _change_view(self, view: int, size: int, first: Connection) -> None:
        """Drop the workers of earlier views. The parameters stay until the new ones call begin."""
        self.view, self.size = view, size
        self.applied_steps = dict(self.shard.progress.applied_steps) if self.shard is not None else None
        self.begins, self.collects, self.gates, self.pulls, self.failed_pushes = {}, {}, {}, [], {}
        self.sessions, self.finished, self.failed_workers = {}, set(), []
        for connection in [p for p, k in self.members.items() if k.rank is not None and p is not first]:
            self.members[connection].is_prefetch = True  # its end says nothing about the present workers
            self._drop(connection)

    def _begin(self, request: _DelayedRequest, rank: int) -> None:
        message = request.message
        if message.mode == "join":
            if self.shard is None:
                raise ConfigError(
                    "A worker cannot join: this server has no parameters yet. All workers must call begin first."
                )
            clock = self.shard.progress.join(rank, message.clock)
            request.connection.send(_reply(message.id, self.shard, clock=clock))
            return
        self.begins[rank] = request
        if len(self.begins) < self.size:
            return
        begins, self.begins = self.begins, {}
        try:
            self._copy_unsent()
            if all(b.message.mode == "keep" for b in begins.values()):
                if self.shard is None:
                    raise ConfigError("The workers want to keep this server's parameters, but it has none.")
                self.shard.restart(self.size, message.clock)
            else:
                self.shard = self._new_shard(begins[0])
                self.first_version = self.shard.version
            self.collects, self.gates, self.pulls, self.failed_pushes = {}, {}, [], {}
        except Exception as error:
            for waiting in begins.values():
                self._fail(waiting, _describe(error), False)
            return
        for waiting in begins.values():
            reply = m.Reply(waiting.message.id, self.shard.version, message.clock, clock=message.clock)
            self._send(waiting.connection, reply)

    def _new_shard(self, first: _DelayedRequest) -> Shard:
        message: m.Begin = first.message
        if message.rule not in RULES:
            raise ConfigError(f"There is no rule {message.rule!r}. Known: {', '.join(RULES)}.")
        part = cut_rows(message.shapes, self.shards)[self.index]
        parameters, optimizer, state = torch.split_with_sizes(first.bulk, message.parts)
        shard = Shard(
            parameters.clone().view(torch.float32),
            chunks_in(message.shapes, part, message.sparse),
            optimizer=optimizer.numpy().tobytes(),
            groups=message.groups,
            rule=message.rule,  # type: ignore[arg-type]  # checked above
            size=self.size,
            rate=message.rate,
            clock=message.clock,
        )
        if state.numel():
            shard.load(load_state(state.numpy().tobytes()))
        return shard

    def _push(self, request: _DelayedRequest, rank: int, shard: Shard) -> None:
        message: m.Push = request.message
        self._copy_unsent()
        try:
            age = shard.apply(
                rank,
                message.id,
                _gradient(message.update, request.bulk),
                weight=message.weight,
                clock=message.clock,
                read_version=message.read_version,
                hyperparameters=message.hyperparameters,
            )
        except Exception as error:
            self.failed_pushes[rank] = m.ErrorReply(message.id, _describe(error), False)
            request.connection.send(self.failed_pushes[rank])
        else:
            request.connection.send(_reply(message.id, shard, staleness=age))
            self._open_gates()
        self._answer_pulls()

    def _collect(self, request: _DelayedRequest, rank: int, shard: Shard) -> None:
        message: m.Collect = request.message
        if len(shard.progress.clocks) < self.size:
            missing = sorted(set(range(self.size)) - set(shard.progress.clocks))
            self._fail(request, f"Rank {missing[0]} failed, and rule 'collect' needs all workers' gradients.", True)
            return
        self._copy_unsent()
        self.collects[rank] = request
        try:
            collected = shard.collect(
                rank,
                message.id,
                _gradient(message.update, request.bulk),
                weight=message.weight,
                clock=message.clock,
                piggybacked=message.piggybacked,
                clip_norm=message.clip_norm,
                hyperparameters=message.hyperparameters,
            )
        except Exception as error:
            waiting, self.collects = self.collects, {}
            for other, each in waiting.items():
                shard.withdraw(other)
                self._fail(each, _describe(error), False)
            return
        if collected is None:
            return
        waiting, self.collects = self.collects, {}
        for other, each in waiting.items():
            wants = each.message.wants_parameters
            shard.progress.record_request(other, each.message.id)
            reply = m.Reply(
                each.message.id, shard.version, shard.progress.slowest, piggybacked=collected.piggybacked.tolist()
            )
            self._send(each.connection, reply, [shard.flat] if wants else [], may_change=True)
        self._open_gates()

    def _open_gates(self) -> None:
        shard = self.shard
        if shard is None:
            return
        for rank, request in list(self.gates.items()):
            if shard.progress.may_proceed(request.message.clock, request.message.bound):
                del self.gates[rank]
                self._send(request.connection, _reply(request.message.id, shard))

    def _answer_pulls(self) -> None:
        shard = self.shard
        assert shard is not None
        pulls, self.pulls = self.pulls, []
        for request in pulls:
            member = self.members.get(request.connection)
            if member is None or member.rank is None:
                continue
            if not shard.progress.has_applied(member.rank, request.message.after):
                failed = self.failed_pushes.get(member.rank)
                if failed is not None and failed.to >= request.message.after:
                    self._fail(request, failed.message, False)  # it waits for a push that will never be applied
                else:
                    self.pulls.append(request)
                continue
            spans = request.message.spans
            parts = [shard.flat] if spans is None else [shard.flat[low:high] for low, high in spans]
            self._send(
                request.connection,
                _reply(request.message.id, shard),
                parts,
                may_change=True,
            )

    def _copy_unsent(self) -> None:
        """Before the parameters change, copy those that are still being sent."""
        for connection in self.members:
            connection.copy_pending()

    def _fail(self, request: _DelayedRequest, message: str, is_peer_failure: bool) -> None:
        self._send(request.connection, m.ErrorReply(request.message.id, message, is_peer_failure))

    def _send(
        self, connection: Connection, message: m.FromServer, bulk: list[Tensor] | None = None, **how: bool
    ) -> None:
        """Send to a worker other than the one being handled: if it has disconnected, drop it and continue."""
        try:
            connection.send(message, bulk or [], **how)
        except Disconnected:
            self._drop(connection)


def _reply(id_: int, shard: Shard, **more: Any) -> m.Reply:
    return m.Reply(id_, shard.version, shard.progress.slowest, **more)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _gradient(update: m.GradientFormat, bulk: Tensor) -> Gradient:
    """The gradient that the bulk holds."""
    head = 8 * sum(count for _, count in update.rows)
    rows = {}
    if update.rows:
        each = torch.split_with_sizes(bulk[:head].view(torch.int64), [count for _, count in update.rows])
        rows = {chunk: tensor for (chunk, _), tensor in zip(update.rows, each, strict=True)}
    payload = bulk[head:]
    if update.codec is None:
        values = payload.view(torch.float32)
    else:
        name, settings = update.codec
        values = CODECS[name](*settings).decode(payload, update.numel)
    if values.numel() != update.numel:
        raise ValueError(f"The message describes {update.numel} values, but {values.numel()} arrived.")
    return Gradient(values, rows, update.spans)
