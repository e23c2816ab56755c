"""The process around one shard: a loop that takes requests from workers and answers them, some of them later.

Here: `serve`. One thread, one selector, and nothing in it waits for a single worker: who is slow to read or write, or
stops altogether, holds up nobody else. Not here: what a request does to the parameters (`shard.py`), how bytes travel
(`connection.py`), and who starts and supervises servers.

Answers that come later:

    Begin      when all workers have said it, so that nobody is still in the training before
    Collect    when all gradients of the step are there
    Gate       when nobody is too far behind
    Pull       (fetching ahead, on a connection of its own) when the worker's own pushes before it were applied
"""

from __future__ import annotations

import io
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from syncline.algorithms.codecs import BF16, Codec, Exact, Int8, OneBit, TopK
from syncline.algorithms.partition import cut_rows
from syncline.comms.parameter_server import connection
from syncline.comms.parameter_server import messages as m
from syncline.comms.parameter_server.connection import Door, PeerGone, listen
from syncline.comms.parameter_server.mailbox import Mailbox
from syncline.comms.parameter_server.pieces import pieces_of
from syncline.comms.parameter_server.shard import RULES, Gradient, Shard
from syncline.errors import ConfigError

__all__ = ["CODECS", "Served", "serve"]

Peer: TypeAlias = connection.Peer[m.FromWorker]
Frame: TypeAlias = connection.Frame[m.FromWorker]

CODECS: dict[str, type[Codec]] = {kind.__name__: kind for kind in (BF16, Exact, Int8, OneBit, TopK)}
"""The codecs whose payloads a server can read."""

_SLICE_S = 0.2  # how often the loop looks whether it should stop
_STRANGERS = 256  # how many connections may be without a proof at a time, besides the workers'


@dataclass(frozen=True)
class Served:
    """How it ended."""

    said_goodbye: frozenset[int]
    lost: tuple[int, ...]
    """Workers that left without a goodbye, in the order of leaving; one that came back is not among them."""
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
    on_lost: Callable[[int], None] = lambda _: None,
) -> Served:
    """Hold shard `shard_index` of `shards` for `size` workers, until all have said goodbye or `should_stop()`.

    Listens on a free port of `host` and tells `on_ready` the address, "host:port". `should_stop` is asked at least five
    times a second. `on_lost` is told each worker whose connection ended without a goodbye; the others go on, and
    another worker may take its place.
    """
    with listen(host) as listener, selectors.DefaultSelector() as selector:
        # All workers may come at the same moment, each with one connection for now and one for ahead.
        door = Door(listener, secret, m.decode_from_worker, selector, room=_STRANGERS + 2 * size)
        loop = _Loop(selector, door, shard_index, shards, size, on_lost)
        port = listener.getsockname()[1]
        on_ready(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        try:
            asks_at = 0.0
            while len(loop.departed) < loop.size:
                if (now := time.monotonic()) >= asks_at:
                    asks_at = now + _SLICE_S / 2
                    if should_stop():
                        break
                    door.tend()
                for key, events in selector.select(_SLICE_S / 2):
                    if key.data is door:
                        door.accept()
                    else:
                        loop.attend(key.data, events)
            loop.see_off()
        finally:
            door.close()
            for peer in list(loop.members):
                peer.close()
        shard = loop.shard
        return Served(
            frozenset(loop.departed),
            tuple(loop.lost),
            shard.version - loop.first_version if shard else 0,
            dict(shard.staleness) if shard else {},
        )


@dataclass
class _Member:
    """What the loop knows of a connection."""

    rank: int | None = None
    is_ahead: bool = False
    session: int = 0
    said_goodbye: bool = False
    is_written_to: bool = False
    """The selector watches for room in the kernel's buffer."""


@dataclass
class _Waiting:
    """A request that is answered later."""

    peer: Peer
    message: Any
    bulk: Tensor


class _Loop:
    def __init__(
        self,
        selector: selectors.BaseSelector,
        door: Door[m.FromWorker],
        shard_index: int,
        shards: int,
        size: int,
        on_lost: Callable[[int], None],
    ) -> None:
        self.selector, self.door = selector, door
        self.index, self.shards, self.size = shard_index, shards, size
        self.view = 0
        self.reached: dict[int, int] | None = None  # by the workers of the View before
        self.on_lost = on_lost
        self.shard: Shard | None = None
        self.first_version = 0
        self.members: dict[Peer, _Member] = {}
        self.sessions: dict[int, int] = {}
        self.departed: set[int] = set()
        self.lost: list[int] = []
        self.begins: dict[int, _Waiting] = {}
        self.collects: dict[int, _Waiting] = {}
        self.gates: dict[int, _Waiting] = {}
        self.pulls: list[_Waiting] = []
        self.failed: dict[int, m.Failed] = {}  # a worker's last push that could not be applied

    # Connections

    def attend(self, peer: Peer, events: int) -> None:
        if peer not in self.members and self.door.admit(peer):
            self.members[peer] = _Member()
        if events & selectors.EVENT_WRITE and peer in self.members:
            self._protected(peer, peer.flush)
        if events & selectors.EVENT_READ and peer in self.members:
            self._protected(peer, lambda: self._read(peer))

    def see_off(self) -> None:
        """The last answers, for those who wait for them, leave before the connections end."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            unsent = [p for p in self.members if p.has_more_to_send and self.members[p].said_goodbye]
            if not unsent:
                return
            self.selector.select(0.02)
            for peer in unsent:
                self._protected(peer, peer.flush)

    def _protected(self, peer: Peer, action: Callable[[], None]) -> None:
        try:
            action()
        except PeerGone:
            self._drop(peer)
        self._watch()

    def _watch(self) -> None:
        for peer, member in self.members.items():
            if member.is_written_to != peer.has_more_to_send:
                member.is_written_to = peer.has_more_to_send
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.is_written_to else 0)
                self.selector.modify(peer, wanted, peer)

    def _drop(self, peer: Peer) -> None:
        member = self.members.pop(peer, None)
        if member is None:
            return
        self.selector.unregister(peer)
        peer.close()
        self.pulls = [w for w in self.pulls if w.peer is not peer]
        rank = member.rank
        if rank is None or member.is_ahead or self.sessions.get(rank) != member.session:
            return
        for waiting in (self.begins, self.collects, self.gates):
            if rank in waiting and waiting[rank].peer is peer:
                del waiting[rank]
        if not member.said_goodbye:
            self.lost.append(rank)
        self._leave(rank, "said goodbye" if member.said_goodbye else "was lost")
        if not member.said_goodbye:
            self.on_lost(rank)

    def _leave(self, rank: int, how: str) -> None:
        """A worker is gone: nobody may go on waiting for it."""
        if self.shard is not None:
            self.shard.leave(rank)
        waiting, self.collects = self.collects, {}
        for other, request in waiting.items():
            if self.shard is not None:
                self.shard.withdraw(other)
            self._fail(request, f"Worker {rank} {how} before it had sent its gradient, and all are needed.", True)
        self._open_gates()

    # Requests

    def _read(self, peer: Peer) -> None:
        frame = peer.read()
        if frame is None:
            return
        member = self.members[peer]
        if member.rank is None and not isinstance(frame.message, m.Hello):
            raise PeerGone("did not say hello")
        try:
            self._handle(peer, member, frame)
        except PeerGone:
            raise
        except Exception as error:
            # Whatever a request leads to must not end the training of the others, nor of the one who asked wrongly.
            to = getattr(frame.message, "id", 0)
            peer.send(m.Failed(to, _told(error), False))

    def _handle(self, peer: Peer, member: _Member, frame: Frame) -> None:
        message, bulk = frame
        match message:
            case m.Hello():
                self._hello(peer, member, message)
                return
            case m.Offer():
                peer.mailbox = Mailbox.attach(message.address, message.token, message.size_bytes)
                accepted, box = peer.mailbox is not None, peer.mailbox
                peer.mailbox = None  # the worker may use it when it has heard so; this answer has no bulk
                peer.send(m.Reply(message.id, accepted=accepted))
                peer.mailbox = box
                return
        rank = member.rank
        assert rank is not None
        match message:
            case m.Begin():
                self._begin(_Waiting(peer, message, bulk), rank)
                return
            case m.Earlier():
                peer.send(m.Reply(message.id, reached=self.reached))
                return
            case m.Goodbye():
                member.said_goodbye = True
                self.departed.add(rank)
                self._leave(rank, "said goodbye")
                peer.send(m.Reply(message.id))
                return
        shard = self.shard
        if shard is None:
            raise ConfigError("No training has begun at this server. Every worker must call begin first.")
        match message:
            case m.Push():
                self._push(_Waiting(peer, message, bulk), rank, shard)
            case m.Collect():
                self._collect(_Waiting(peer, message, bulk), rank, shard)
            case m.Elastic():
                self._settle_readers()
                worker = bulk.view(torch.float32)
                shard.exchange(rank, message.id, worker, message.clock)
                peer.send(m.Reply(message.id, shard.version, shard.slowest), [worker])
            case m.Tick():
                shard.advance(rank, message.clock)
                self._open_gates()
            case m.Pull():
                self.pulls.append(_Waiting(peer, message, bulk))
                self._answer_pulls()
            case m.Gate():
                if replaced := self.gates.pop(rank, None):  # nobody waits for it any more, but each request has a reply
                    self._send(replaced.peer, m.Reply(replaced.message.id, shard.version, shard.slowest))
                self.gates[rank] = _Waiting(peer, message, bulk)
                self._open_gates()
            case m.SaveState():
                file = io.BytesIO()
                torch.save(shard.state(), file)
                data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).clone()
                peer.send(m.Reply(message.id, shard.version, shard.slowest), [data])

    def _hello(self, peer: Peer, member: _Member, message: m.Hello) -> None:
        if message.view > self.view:
            self._change_view(message.view, message.size, peer)
        if message.view < self.view:
            raise PeerGone("belongs to an earlier View")
        if message.size != self.size or not 0 <= message.rank < self.size:
            reason = f"Worker {message.rank} of {message.size} connected, but this server is for {self.size} workers."
            peer.send(m.Failed(0, reason, False))
            raise PeerGone(reason)
        member.rank, member.is_ahead, member.session = message.rank, message.is_ahead, message.session
        if message.is_ahead:
            return
        before = [p for p, k in self.members.items() if k.rank == message.rank and not k.is_ahead and p is not peer]
        if self.sessions.get(message.rank) != message.session:
            self.sessions[message.rank] = message.session
            self.failed.pop(message.rank, None)
            if self.shard is not None:
                self.shard.forget_requests(message.rank)
        for old in before:  # the worker's earlier connection, whose end has not been noticed yet
            self._drop(old)
        self.departed.discard(message.rank)
        if message.rank in self.lost:
            self.lost.remove(message.rank)

    def _change_view(self, view: int, size: int, first: Peer) -> None:
        """Other workers from now on. The parameters stay, until these begin with theirs."""
        self.view, self.size = view, size
        self.reached = dict(self.shard.reached) if self.shard is not None else None
        self.begins, self.collects, self.gates, self.pulls, self.failed = {}, {}, {}, [], {}
        self.sessions, self.departed, self.lost = {}, set(), []
        for peer in [p for p, k in self.members.items() if k.rank is not None and p is not first]:
            self.members[peer].is_ahead = True  # its end says nothing about the workers there are now
            self._drop(peer)

    def _begin(self, request: _Waiting, rank: int) -> None:
        message = request.message
        if message.joins:
            if self.shard is None:
                raise ConfigError("A worker wants to join, but no training has begun at this server.")
            clock = self.shard.join(rank, message.clock)
            request.peer.send(m.Reply(message.id, self.shard.version, self.shard.slowest, clock=clock))
            return
        self.begins[rank] = request
        if len(self.begins) < self.size:
            return
        begins, self.begins = self.begins, {}
        try:
            self._settle_readers()
            if all(b.message.keeps for b in begins.values()):
                if self.shard is None:
                    raise ConfigError("The workers want to go on with what is here, but nothing is.")
                self.shard.restart(self.size, message.clock)
            else:
                self.shard = self._new_shard(begins[0])
                self.first_version = self.shard.version
            self.collects, self.gates, self.pulls, self.failed = {}, {}, [], {}
        except Exception as error:
            for waiting in begins.values():
                self._fail(waiting, _told(error), False)
            return
        for waiting in begins.values():
            reply = m.Reply(waiting.message.id, self.shard.version, message.clock, clock=message.clock)
            self._send(waiting.peer, reply)

    def _new_shard(self, first: _Waiting) -> Shard:
        message: m.Begin = first.message
        if message.rule not in RULES:
            raise ConfigError(f"There is no rule {message.rule!r}. Known: {', '.join(RULES)}.")
        part = cut_rows(message.shapes, self.shards)[self.index]
        parameters, shell, state = torch.split_with_sizes(first.bulk, message.parts)
        shard = Shard(
            parameters.clone().view(torch.float32),
            pieces_of(message.shapes, part, message.sparse),
            shell=shell.numpy().tobytes(),
            groups=message.groups,
            rule=message.rule,  # type: ignore[arg-type]  # checked above
            size=self.size,
            rate=message.rate,
            clock=message.clock,
        )
        if state.numel():
            shard.load(torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True))
        return shard

    def _push(self, request: _Waiting, rank: int, shard: Shard) -> None:
        message: m.Push = request.message
        self._settle_readers()
        try:
            age = shard.apply(
                rank,
                message.id,
                _gradient(message.update, request.bulk),
                weight=message.weight,
                clock=message.clock,
                read_version=message.read_version,
                settings=message.settings,
            )
        except Exception as error:
            self.failed[rank] = m.Failed(message.id, _told(error), False)
            request.peer.send(self.failed[rank])
        else:
            request.peer.send(m.Reply(message.id, shard.version, shard.slowest, age))
            self._open_gates()
        self._answer_pulls()

    def _collect(self, request: _Waiting, rank: int, shard: Shard) -> None:
        message: m.Collect = request.message
        if len(shard.clocks) < self.size:
            missing = sorted(set(range(self.size)) - set(shard.clocks))
            self._fail(request, f"Worker {missing[0]} is gone, and the gradients of all workers are needed.", True)
            return
        self._settle_readers()
        self.collects[rank] = request
        try:
            collected = shard.collect(
                rank,
                message.id,
                _gradient(message.update, request.bulk),
                weight=message.weight,
                clock=message.clock,
                riders=message.riders,
                clip_norm=message.clip_norm,
                settings=message.settings,
            )
        except Exception as error:
            waiting, self.collects = self.collects, {}
            for other, each in waiting.items():
                shard.withdraw(other)
                self._fail(each, _told(error), False)
            return
        if collected is None:
            return
        waiting, self.collects = self.collects, {}
        for other, each in waiting.items():
            wants = each.message.wants_parameters
            shard.met_collect(other, each.message.id)
            reply = m.Reply(each.message.id, shard.version, shard.slowest, riders=collected.riders.tolist())
            self._send(each.peer, reply, [shard.flat] if wants else [], may_change=True)
        self._open_gates()

    def _open_gates(self) -> None:
        shard = self.shard
        if shard is None:
            return
        for rank, request in list(self.gates.items()):
            if shard.may_proceed(request.message.clock, request.message.bound):
                del self.gates[rank]
                self._send(request.peer, m.Reply(request.message.id, shard.version, shard.slowest))

    def _answer_pulls(self) -> None:
        shard = self.shard
        assert shard is not None
        pulls, self.pulls = self.pulls, []
        for request in pulls:
            member = self.members.get(request.peer)
            if member is None or member.rank is None:
                continue
            if not shard.has_met(member.rank, request.message.after):
                failed = self.failed.get(member.rank)
                if failed is not None and failed.to >= request.message.after:
                    self._fail(request, failed.message, False)  # it waits for a push that will never count
                else:
                    self.pulls.append(request)
                continue
            spans = request.message.spans
            parts = [shard.flat] if spans is None else [shard.flat[low:high] for low, high in spans]
            self._send(request.peer, m.Reply(request.message.id, shard.version, shard.slowest), parts, may_change=True)

    def _settle_readers(self) -> None:
        """The parameters are about to change: who is still being sent them gets them as they were."""
        for peer in self.members:
            peer.keep_promises()

    def _fail(self, request: _Waiting, message: str, is_peers_fault: bool) -> None:
        self._send(request.peer, m.Failed(request.message.id, message, is_peers_fault))

    def _send(self, peer: Peer, message: m.FromServer, bulk: list[Tensor] | None = None, **how: bool) -> None:
        """To whoever may be gone by now without harm to the request in hand."""
        try:
            peer.send(message, bulk or [], **how)
        except PeerGone:
            self._drop(peer)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _gradient(update: m.Update, bulk: Tensor) -> Gradient:
    """A gradient from how it travelled."""
    head = 8 * sum(count for _, count in update.rows)
    rows = {}
    if update.rows:
        each = torch.split_with_sizes(bulk[:head].view(torch.int64), [count for _, count in update.rows])
        rows = {piece: tensor for (piece, _), tensor in zip(update.rows, each, strict=True)}
    payload = bulk[head:]
    if update.codec is None:
        values = payload.view(torch.float32)
    else:
        name, settings = update.codec
        values = CODECS[name](*settings).decode(payload, update.numel)
    if values.numel() != update.numel:
        raise ValueError(f"{update.numel} values were announced, but {values.numel()} came.")
    return Gradient(values, rows, update.spans)
