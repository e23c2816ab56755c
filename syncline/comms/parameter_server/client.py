"""A worker's view of all the servers of parameters as one.

Here: `ParameterServers`: cutting what is sent along the shards, putting together what comes, and waiting only where
it must. Not here: when to push and pull (strategies), frames and limits (`connection.py`).

How little is waited for:

- `push` and `tick` hand over and return. That a push was applied is noticed before the next one on that connection,
  because only then may its memory be used again. Servers take requests in order, so a `pull` sees all own pushes.
- `pull_ahead` fetches on connections and a thread of its own, into memory of its own.
- A `gate` that did not open in time stays with the servers; asking again costs nothing.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from syncline.algorithms.codecs import Codec, ErrorFeedback
from syncline.algorithms.partition import cut_rows
from syncline.algorithms.staleness import record
from syncline.comms.parameter_server import messages as m
from syncline.comms.parameter_server.connection import Link
from syncline.comms.parameter_server.mailbox import Mailbox
from syncline.comms.parameter_server.pieces import Piece, Span, overlap, pieces_of
from syncline.comms.parameter_server.server import CODECS
from syncline.comms.parameter_server.shell import (
    Settings,
    cut_state,
    flatten,
    group_members,
    settings_of,
    state_of,
    write_shell,
)
from syncline.errors import ConfigError, PeerLost, SynclineError

__all__ = ["ParameterServers"]

_GOODBYE_S = 30.0
_NAP_S = 0.2


class ParameterServers:
    """The servers of one run, as worker `rank` of `size` uses them. For one thread.

    Vectors (`flat`, `out`) hold all parameters given to `begin`, one behind the other, each as its memory has it: a
    channels-last weight in channels-last order. They are float32, contiguous and on the CPU; they may be longer than
    the parameters, the rest is not looked at. Whatever waits raises `PeerLost` after `timeout_s` without a sign of
    life, or when `should_stop()` turns true.
    """

    ranges: list[Span]
    """The part of the vector that each shard holds. Known after `begin`."""
    clock: int
    """How many steps this worker has finished."""
    cache_clock: int
    """The slowest worker's clock at the last `pull` or `take_ahead`; see `syncline.algorithms.staleness.is_fresh`."""
    staleness: dict[int, int]
    """How many of this worker's updates had which staleness (the largest of all shards), since `take_staleness`."""

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes,
        *,
        rank: int,
        size: int,
        view: int = 0,
        timeout_s: float = 300.0,
        share_memory: bool = True,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Connect to the shards, given in order. `share_memory=False` sends everything through sockets.

        `view` is a larger number each time the workers change: the servers then forget those of before.
        """
        if not addresses:
            raise ConfigError("There is no server of parameters to connect to: the list of addresses is empty.")
        self.rank, self.size, self._view = rank, size, view
        self.ranges = []
        self.clock = self.cache_clock = 0
        self.staleness = {}
        self._addresses = list(addresses)
        self._secret = secret
        self._timeout_s = timeout_s
        self._share_memory = share_memory
        self._should_stop = should_stop or (lambda: False)
        self._session = secrets.randbits(62)
        self._optimizer: torch.optim.Optimizer | None = None
        self._settings: Settings | None = None
        self._shapes: list[tuple[int, ...]] = []
        self._pieces: list[list[Piece]] = []
        self._ages: dict[int, tuple[int, int]] = {}  # push -> shards that have not answered, largest staleness so far
        self._pushes = 0
        self._gate: tuple[int, int] | None = None  # the clock and bound that were asked for
        self._ahead: _Ahead | None = None
        self._closed_bytes = (0, 0)
        self._lines: list[_Line] = []
        try:
            for index in range(len(addresses)):
                self._lines.append(self._connect(index, is_ahead=False))
        except BaseException:
            self.close(goodbye=False)
            raise

    # What has moved

    @property
    def bytes_sent(self) -> int:
        """Bulk that this worker has given to the servers, through sockets and mailboxes."""
        return self._closed_bytes[0] + sum(line.link.bytes_sent for line in self._all_lines())

    @property
    def bytes_received(self) -> int:
        """Bulk that this worker has got from the servers, through sockets and mailboxes."""
        return self._closed_bytes[1] + sum(line.link.bytes_received for line in self._all_lines())

    @property
    def uses_mailboxes(self) -> bool:
        """Whether bulk goes through shared memory to every shard."""
        return all(line.link.mailbox is not None for line in self._lines)

    # Beginning and ending

    def begin(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        rule: Literal["apply", "collect", "elastic"],
        rate: float = 0.0,
        clock: int = 0,
        sparse: Sequence[bool] | None = None,
        state: Sequence[Mapping[str, Any]] | None = None,
        joins: bool = False,
        keeps: bool = False,
    ) -> None:
        """Start the servers anew, together with all other workers.

        The servers start from rank 0's parameters and a copy of its optimiser, with `state` from an earlier `state()`
        (of any number of shards) or else with whatever state rank 0's optimiser has. All clocks start at `clock`.
        `sparse` says which parameters get sparse gradients at the servers, as with `nn.Embedding(sparse=True)`.
        `rate` is the moving rate of rule "elastic".

        `joins=True` is for a worker that takes the place of a lost one in what the others have begun: nothing starts
        anew, and `clock` becomes at least the slowest worker's.

        `keeps=True`, from all workers of a new View: the servers go on with the parameters and the optimiser they have.
        """
        _check_parameters(parameters)
        self._drop_ahead()
        self._optimizer = optimizer
        self._settings = None
        self._shapes = [tuple(p.shape) for p in parameters]
        flags = [bool(s) for s in sparse] if sparse is not None else [False] * len(self._shapes)
        if len(flags) != len(self._shapes):
            raise ConfigError(f"sparse has {len(flags)} entries for {len(self._shapes)} parameters.")
        if rule == "elastic" and not 0 < rate <= 1:
            raise ConfigError(f"The rate of rule 'elastic' is {rate}, but it must be above 0 and at most 1.")
        self.ranges = cut_rows(self._shapes, len(self._lines))
        self._pieces = [pieces_of(self._shapes, part, flags) for part in self.ranges]
        self._gate = None
        for line, part in zip(self._lines, self.ranges, strict=True):
            self._settle(line)
            self._offer_mailbox(line, part)
        groups = group_members(optimizer, parameters)
        speaks = self.rank == 0 and not joins and not keeps
        flat = torch.cat([flatten(p) for p in parameters]) if speaks and parameters else torch.empty(0)
        shell = write_shell(optimizer) if speaks else b""
        version, entries = _known_state(state, optimizer, parameters) if speaks else (0, [])
        ids = []
        for line, part, pieces in zip(self._lines, self.ranges, self._pieces, strict=True):
            bulk = [flat[slice(*part)], _as_tensor(shell), _as_tensor(_saved(version, entries, pieces))]
            sizes = (bulk[0].nbytes, bulk[1].nbytes, bulk[2].nbytes) if speaks else (0, 0, 0)
            id_ = line.expect()
            message = m.Begin(id_, rule, rate, clock, joins, self._shapes, flags, groups, sizes, keeps)
            line.link.send(message, bulk if speaks else [])
            ids.append(id_)
        replies = self._await_all(ids)
        for line, reply in zip(self._lines, replies, strict=True):
            line.version, line.last_push = reply.version, 0
            line.expected.clear()  # a gate from before will not be answered
        self.clock = max(reply.clock for reply in replies)
        self.cache_clock = min(reply.slowest for reply in replies)

    def earlier(self) -> dict[int, int] | None:
        """Of which worker of the View before how many steps are in the parameters.

        None if it cannot be said: a server is new, or one has got something that another has not.
        """
        replies = self._await_all([line.request(m.Earlier) for line in self._lines])
        first = replies[0].reached
        return first if first is not None and all(reply.reached == first for reply in replies) else None

    def state(self) -> list[dict[str, Any]]:
        """What the servers' optimisers remember, one entry per shard; for `begin` later, also with other shards.

        Plain tensors and numbers (`torch.load(weights_only=True)` reads it). One worker calls it, while none pushes.
        """
        found: list[dict[str, Any]] = []
        for line in self._lines:
            self._settle(line)
            data: list[bytes] = []
            id_ = line.expect(copy_to=data)
            line.link.send(m.SaveState(id_))
            self._await(line, id_)
            found.append(torch.load(io.BytesIO(data[0]), weights_only=True))
        return found

    def close(self, *, goodbye: bool = True) -> None:
        """Wait until all pushes were applied, say goodbye and disconnect. `goodbye=False` just disconnects."""
        self._drop_ahead()
        lines, self._lines = self._lines, []
        try:
            if goodbye:
                for line in lines:
                    line.link.timeout_s = min(line.link.timeout_s, _GOODBYE_S)
                    self._settle(line)
                ids = [line.request(m.Goodbye) for line in lines]
                for line, id_ in zip(lines, ids, strict=True):
                    self._await(line, id_)
        except PeerLost:
            pass  # whoever is gone needs no goodbye
        finally:
            for line in lines:
                self._close_line(line)

    def __enter__(self) -> ParameterServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(goodbye=error is None)

    # Gradients

    def part(self, index: int, flat: Tensor, ranges: Sequence[Span] | None = None) -> Tensor:
        """What shard `index` is to get of `flat`, or of these ranges of it, in one piece: what its payload encodes."""
        own = self.ranges[index]
        if ranges is None:
            return flat[slice(*own)]
        found = [flat[slice(*common)] for span in ranges if (common := overlap(span, own))]
        return torch.cat(found) if found else flat[:0]

    def push(
        self,
        flat: Tensor | None,
        *,
        weight: float,
        ranges: Sequence[Span] | None = None,
        rows: Mapping[int, Tensor] | None = None,
        payloads: Sequence[Tensor] | None = None,
        codec: Codec | None = None,
        ticks: int = 1,
    ) -> None:
        """Rule "apply": hand over the gradient and advance the clock by `ticks`. `flat` may be overwritten at once.

        `ranges` (ascending and apart): only these parts of `flat` travel. Parameters outside of them are left alone, as
        torch leaves parameters without a gradient; a parameter that is partly inside has zeros elsewhere.

        `rows`, by index of the parameter (int64, any order): of these parameters only the touched rows travel.

        `payloads` and `codec`: the gradient is already encoded. `payloads[i]` is what `codec` made of
        `part(i, flat, ranges)`; `flat` is None then, and `rows` must be too. Residuals are the caller's.
        """
        outgoing = self._outgoing(flat, ranges, rows, payloads, codec)
        settings = self._changed_settings()
        self.clock += ticks
        self._pushes += 1
        number = self._pushes
        self._ages[number] = (len(self._lines), -1)
        for line, (update, bulk) in zip(self._lines, outgoing, strict=True):
            self._settle(line)
            id_ = line.expect(on_push=lambda reply: self._note_age(number, reply.staleness))
            line.last_push = id_
            line.link.send(m.Push(id_, self.clock, weight, line.version, update, settings), bulk)

    def collect(
        self,
        flat: Tensor | None,
        riders: Tensor,
        *,
        weight: float,
        clip_norm: float | None = None,
        rows: Mapping[int, Tensor] | None = None,
        payloads: Sequence[Tensor] | None = None,
        codec: Codec | None = None,
        out: Tensor | None = None,
        ticks: int = 1,
    ) -> None:
        """Rule "collect": hand over the gradient, and wait until all workers' were applied together.

        `riders` (a few float32 numbers, the loss first) is overwritten by its weighted sum over all workers; if the
        summed loss is not finite, nothing was applied. `clip_norm` limits the norm of the summed gradient, which only
        a single shard can know. `out` is overwritten by the new parameters: a `pull` without a second round trip.
        The rest is as in `push`.
        """
        if clip_norm is not None and len(self._lines) > 1:
            raise ConfigError(
                f"clip_norm needs the norm of the whole gradient, but it is spread over {len(self._lines)} servers. "
                "Use one server, or train without clip_norm."
            )
        outgoing = self._outgoing(flat, None, rows, payloads, codec)
        settings = self._changed_settings()
        self.clock += ticks
        ids = []
        for line, part, (update, bulk) in zip(self._lines, self.ranges, outgoing, strict=True):
            self._settle(line)
            id_ = line.expect([] if out is None else [_checked(out, part[1])[slice(*part)]])
            wants = out is not None
            message = m.Collect(id_, self.clock, weight, riders.tolist(), clip_norm, wants, update, settings)
            line.link.send(message, bulk)
            ids.append(id_)
        replies = self._await_all(ids)
        riders.copy_(torch.tensor(replies[0].riders, dtype=torch.float32))
        if out is not None:
            self._note_read(replies)

    def tick(self, ticks: int = 1) -> None:
        """Advance the clock without a gradient."""
        self.clock += ticks
        for line in self._lines:
            line.link.send(m.Tick(self.clock))

    # Parameters

    def pull(self, out: Tensor, ranges: Sequence[Span] | None = None) -> None:
        """Overwrite `out`, or these ranges of it, with the servers' parameters; own pushes are in them."""
        ids = []
        for line, part in zip(self._lines, self.ranges, strict=True):
            spans = [part] if ranges is None else [c for span in ranges if (c := overlap(span, part))]
            relative = None if ranges is None else [(low - part[0], high - part[0]) for low, high in spans]
            id_ = line.expect([_checked(out, high)[low:high] for low, high in spans])
            line.link.send(m.Pull(id_, 0, relative))
            ids.append(id_)
        self._note_read(self._await_all(ids))

    def pull_ahead(self) -> None:
        """Start fetching the parameters in the background; own pushes so far will be in them.

        Nothing happens if a fetch is under way. One that is complete but was not taken is replaced.
        """
        if self._ahead is None:
            self._ahead = _Ahead([self._connect_ahead(i) for i in range(len(self._lines))])
        self._ahead.start([line.last_push for line in self._lines])

    def take_ahead(self, out: Tensor, limit_s: float = 0.0) -> bool:
        """If what `pull_ahead` fetches is there within `limit_s`, overwrite `out` with it and return True."""
        if self._ahead is None or not (replies := self._ahead.take(limit_s)):
            return False
        for part, landing in zip(self.ranges, self._ahead.landings, strict=True):
            _checked(out, part[1])[slice(*part)].copy_(landing)
        self._note_read(replies)
        return True

    def pull_elastic(self, flat: Tensor, clock: int = 0) -> None:
        """Rule "elastic": this worker, at `flat` after `clock` steps, and the centre pull at each other.

        `flat` becomes flat - d.
        """
        moves = torch.empty(self.ranges[-1][1])
        ids = []
        for line, part in zip(self._lines, self.ranges, strict=True):
            self._settle(line)
            id_ = line.expect([moves[slice(*part)]])
            line.link.send(m.Elastic(id_, clock), [_checked(flat, part[1])[slice(*part)]])
            ids.append(id_)
        self._note_read(self._await_all(ids))
        flat[: moves.numel()].sub_(moves)

    # Waiting for others

    def gate(self, bound: int, limit_s: float) -> bool:
        """Whether, within `limit_s`, nobody is more than `bound` steps behind this worker, as every shard sees it.

        False if not: call again, after other calls if need be. What was asked stays asked.
        """
        if self._gate != (self.clock, bound):
            self._gate = (self.clock, bound)
            for line in self._lines:
                line.gate = line.request(lambda id_: m.Gate(id_, self.clock, bound))
        deadline = time.monotonic() + limit_s
        for line in self._lines:
            while line.gate in line.expected:
                left = deadline - time.monotonic()
                if line.link.is_readable(min(max(left, 0.0), _NAP_S)):
                    line.receive()
                elif left <= 0:
                    return False
                elif self._should_stop():
                    raise PeerLost(f"The run was aborted while this worker waited at the gate of {line.link.what}.")
            if line.gate in line.refused:
                raise line.refused.pop(line.gate)
        self._gate = None
        return True

    def take_staleness(self) -> dict[int, int]:
        """The histogram of the updates that were applied since the last call. Those on their way come next time."""
        for line in self._lines:
            while line.pushes and line.link.is_readable(0.0):
                line.receive()
        taken, self.staleness = self.staleness, {}
        return taken

    # How it is done

    def _connect(self, index: int, *, is_ahead: bool) -> _Line:
        what = f"Shard {index} of {len(self._addresses)} ({self._addresses[index]})"
        link = Link(
            self._addresses[index],
            self._secret,
            what=what,
            timeout_s=self._timeout_s,
            should_stop=self._should_stop,
        )
        try:
            link.send(m.Hello(self.rank, self.size, self._session, is_ahead, self._view))
        except BaseException:
            link.close()
            raise
        return _Line(link)

    def _connect_ahead(self, index: int) -> tuple[_Line, Tensor]:
        line = self._connect(index, is_ahead=True)
        part = self.ranges[index]
        self._offer_mailbox(line, part)
        count = part[1] - part[0]
        box = line.link.mailbox
        landing = torch.empty(count) if box is None else box.bytes[: 4 * count].view(torch.float32)
        return line, landing

    def _offer_mailbox(self, line: _Line, part: Span) -> None:
        """Share memory with the shard, if it can be reached that way."""
        size_bytes = 4 * (part[1] - part[0])
        link = line.link
        if not self._share_memory or (link.mailbox is not None and link.mailbox.bytes.numel() == size_bytes):
            return
        had_one, link.mailbox = link.mailbox is not None, None
        box = Mailbox.create(size_bytes)
        if box is None:
            if had_one:  # the server must not go on using it
                self._await(line, line.request(lambda i: m.Offer(i, "", b"", 0)))
            return
        try:
            if self._await(line, line.request(lambda i: m.Offer(i, box.address, box.token, size_bytes))).accepted:
                link.mailbox = box
        finally:
            box.seal()

    def _outgoing(
        self,
        flat: Tensor | None,
        ranges: Sequence[Span] | None,
        rows: Mapping[int, Tensor] | None,
        payloads: Sequence[Tensor] | None,
        codec: Codec | None,
    ) -> list[tuple[m.Update, list[Tensor]]]:
        """For each shard, how its part of the gradient travels."""
        if (payloads is None) != (codec is None) or (payloads is None) == (flat is None):
            raise ValueError("Give either flat, or payloads and the codec that made them.")
        if payloads is not None and rows:
            raise ValueError("Encoded gradients travel whole: rows cannot be named for them.")
        touched = {i: r.detach().unique() for i, r in (rows or {}).items()}  # type: ignore[no-untyped-call]  # torch's
        found = []
        for index, (part, pieces) in enumerate(zip(self.ranges, self._pieces, strict=True)):
            own = None
            if ranges is not None:
                own = [(c[0] - part[0], c[1] - part[0]) for span in ranges if (c := overlap(span, part))]
            if payloads is not None:
                count = part[1] - part[0] if own is None else sum(high - low for low, high in own)
                update = m.Update(rows=[], spans=own, codec=_codec_name(codec), numel=count)
                found.append((update, [payloads[index]]))
                continue
            assert flat is not None
            mine = _checked(flat, part[1])[slice(*part)]
            if not touched:
                bulk = [mine] if own is None else [mine[low:high] for low, high in own]
                numel = sum(t.numel() for t in bulk)
                found.append((m.Update(rows=[], spans=own, codec=None, numel=numel), bulk))
            else:
                found.append(_by_rows(mine, pieces, touched, own))
        return found

    def _changed_settings(self) -> Settings | None:
        assert self._optimizer is not None, "begin comes first"
        settings = settings_of(self._optimizer)
        if settings == self._settings:
            return None
        self._settings = settings
        return settings

    def _note_age(self, number: int, staleness: int) -> None:
        missing, largest = self._ages.pop(number)
        largest = max(largest, staleness)
        if missing > 1:
            self._ages[number] = (missing - 1, largest)
        elif largest >= 0:
            self.staleness = record(self.staleness, largest)

    def _note_read(self, replies: Sequence[m.Reply]) -> None:
        """The worker now has the parameters of these versions."""
        for line, reply in zip(self._lines, replies, strict=True):
            line.version = reply.version
        self.cache_clock = min(reply.slowest for reply in replies)

    def _settle(self, line: _Line) -> None:
        """Wait until the servers have taken what was pushed: its memory may be used again."""
        while line.pushes:
            line.receive()

    def _await(self, line: _Line, id_: int) -> m.Reply:
        while id_ in line.expected:
            line.receive()
        if id_ in line.refused:
            raise line.refused.pop(id_)
        reply = line.last
        assert reply is not None
        assert reply.to == id_, f"waited for {id_}, but {reply.to} came last"
        return reply

    def _await_all(self, ids: Sequence[int]) -> list[m.Reply]:
        """The replies of all shards, one request each; an error of one only when all have answered."""
        replies, refusals = [], []
        for line, id_ in zip(self._lines, ids, strict=True):
            while id_ in line.expected:
                line.receive()
            refusal = line.refused.pop(id_, None)
            if refusal is not None:
                refusals.append(refusal)
            else:
                replies.append(self._await(line, id_))
        if refusals:
            raise refusals[0]
        return replies

    def _all_lines(self) -> list[_Line]:
        return [*self._lines, *(self._ahead.lines if self._ahead else [])]

    def _close_line(self, line: _Line) -> None:
        sent, received = self._closed_bytes
        self._closed_bytes = sent + line.link.bytes_sent, received + line.link.bytes_received
        line.link.close()

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.close()
            for line in ahead.lines:
                self._close_line(line)


@dataclasses.dataclass
class _Expected:
    """What to do with a reply."""

    into: Sequence[Tensor] | None = ()
    """Its bulk goes here; None leaves it in the mailbox."""
    copy_to: list[bytes] | None = None
    """Its bulk, of whatever length, is put here."""
    on_push: Callable[[m.Reply], None] | None = None


class _Line:
    """A link, and what is expected on it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.expected: dict[int, _Expected] = {}
        self.pushes: set[int] = set()
        self.last: m.Reply | None = None
        self.refused: dict[int, SynclineError] = {}
        self.gate = 0
        self.last_push = 0
        self.version = 0
        """Of the parameters that this worker last read from there."""
        self._ids = itertools.count(1)

    def expect(
        self,
        into: Sequence[Tensor] | None = (),
        *,
        copy_to: list[bytes] | None = None,
        on_push: Callable[[m.Reply], None] | None = None,
    ) -> int:
        """The number for a request whose reply is to be handled so."""
        id_ = next(self._ids)
        self.expected[id_] = _Expected(into, copy_to, on_push)
        if on_push is not None:
            self.pushes.add(id_)
        return id_

    def request(self, message: Callable[[int], m.FromWorker]) -> int:
        """Send a request without bulk whose reply is only waited for."""
        id_ = self.expect()
        self.link.send(message(id_))
        return id_

    def receive(self) -> None:
        """Take in one reply, whichever comes next."""
        message, size, in_mailbox = self.link.receive()
        expected = self.expected.pop(message.to, None)
        self.pushes.discard(message.to)
        if isinstance(message, m.Failed):
            text = f"{self.link.what}: {message.message}"
            error = PeerLost(text) if message.is_peers_fault else SynclineError(text)
            if expected is None or expected.on_push is not None:
                raise error  # nobody waits for this one
            self.refused[message.to] = error
            return
        if expected is None:
            raise PeerLost(f"{self.link.what} answered a question that was not asked.")
        if expected.copy_to is not None:
            room = torch.empty(size, dtype=torch.uint8)
            self.link.take([room], size, in_mailbox)
            expected.copy_to.append(room.numpy().tobytes())
        elif expected.into is not None:
            self.link.take(expected.into, size, in_mailbox)
        self.last = message
        if expected.on_push is not None:
            expected.on_push(message)


class _Ahead:
    """Fetches in the background: a thread, and a connection for each shard."""

    def __init__(self, connected: Sequence[tuple[_Line, Tensor]]) -> None:
        self.lines = [line for line, _ in connected]
        self.landings = [landing for _, landing in connected]
        self._changed = threading.Condition()
        self._wanted: list[int] | None = None
        self._replies: list[m.Reply] = []
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="syncline-parameters-ahead", daemon=True)
        self._thread.start()

    def start(self, after: list[int]) -> None:
        with self._changed:
            if self._wanted is None:
                self._wanted, self._replies = after, []
                self._changed.notify_all()

    def take(self, limit_s: float) -> list[m.Reply]:
        """What has come, once; nothing if it is not complete within `limit_s`, or was never asked for."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted is None, limit_s)
            if self._failure is not None:
                raise self._failure
            replies, self._replies = self._replies, []
            return replies

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for line in self.lines:
            line.link.interrupt()  # wakes the thread if it waits for a reply
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None or self._is_closed)
                if self._is_closed:
                    return
                after = self._wanted
                assert after is not None
            try:
                replies = self._fetch(after)
            except BaseException as failure:
                with self._changed:
                    self._wanted, self._failure = None, failure
                    self._changed.notify_all()
                return
            with self._changed:
                self._wanted, self._replies = None, replies
                self._changed.notify_all()

    def _fetch(self, after: list[int]) -> list[m.Reply]:
        ids = []
        for line, last, landing in zip(self.lines, after, self.landings, strict=True):
            # With a mailbox, the server writes to where it is wanted.
            id_ = line.expect(None if line.link.mailbox is not None else [landing])
            line.link.send(m.Pull(id_, last, None))
            ids.append(id_)
        replies = []
        for line, id_ in zip(self.lines, ids, strict=True):
            while id_ in line.expected:
                line.receive()
            if id_ in line.refused:
                raise line.refused.pop(id_)
            assert line.last is not None
            replies.append(line.last)
        return replies


def _check_parameters(parameters: Sequence[Tensor]) -> None:
    wrong = next((p for p in parameters if p.dtype != torch.float32 or p.device.type != "cpu"), None)
    if wrong is not None:
        raise ConfigError(
            f"Servers of parameters hold float32 tensors on the CPU, but the model has a parameter of {wrong.dtype} on "
            f"{wrong.device}. Convert the model with model.float(), or use a strategy without servers."
        )


def _checked(flat: Tensor, numel: int) -> Tensor:
    """`flat`, if it has at least `numel` values that can be sent or filled as they lie."""
    if flat.dtype != torch.float32 or flat.dim() != 1 or not flat.is_contiguous() or flat.device.type != "cpu":
        raise ValueError(
            f"A contiguous flat float32 tensor on the CPU is needed, but this is {flat.dtype} of shape "
            f"{tuple(flat.shape)} on {flat.device}."
        )
    if flat.numel() < numel:
        raise ValueError(f"The parameters have at least {numel} values, but this tensor has only {flat.numel()}.")
    return flat.detach()


def _by_rows(
    mine: Tensor, pieces: Sequence[Piece], touched: Mapping[int, Tensor], spans: Sequence[Span] | None
) -> tuple[m.Update, list[Tensor]]:
    """A part of the gradient of which some pieces travel by rows."""
    named: list[tuple[int, int]] = []
    indices: list[Tensor] = []
    values: list[Tensor] = []
    for index, piece in enumerate(pieces):
        rows = touched.get(piece.parameter)
        if rows is None:
            own = [piece.span] if spans is None else [c for span in spans if (c := overlap(span, piece.span))]
            values += [mine[low:high] for low, high in own]
            continue
        rows = rows[(rows >= piece.first_row) & (rows < piece.first_row + piece.rows)] - piece.first_row
        named.append((index, len(rows)))
        indices.append(rows)
        values.append(mine[slice(*piece.span)].view(piece.rows, -1)[rows].view(-1))
    numel = sum(v.numel() for v in values)
    return m.Update(rows=named, spans=None if spans is None else list(spans), codec=None, numel=numel), [
        *indices,
        *values,
    ]


def _codec_name(codec: Codec | None) -> tuple[str, list[float]]:
    """What a server needs to make the same codec."""
    plain = codec.codec if isinstance(codec, ErrorFeedback) else codec
    name = type(plain).__name__
    if CODECS.get(name) is not type(plain):
        raise ConfigError(f"A server cannot decode {name}. Use one of {', '.join(sorted(CODECS))}.")
    return name, list(dataclasses.astuple(plain))  # type: ignore[call-overload]  # all of them are dataclasses


def _known_state(
    state: Sequence[Mapping[str, Any]] | None, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> tuple[int, list[Mapping[str, Any]]]:
    """The version, and what is known of all the pieces."""
    if state is None:
        return 0, list(state_of(optimizer, parameters))
    return max((int(s["version"]) for s in state), default=0), [entry for s in state for entry in s["pieces"]]


def _saved(version: int, entries: Sequence[Mapping[str, Any]], pieces: Sequence[Piece]) -> bytes:
    own = cut_state(entries, pieces)
    if not version and not own:
        return b""
    file = io.BytesIO()
    torch.save({"version": version, "clocks": {}, "pieces": own}, file)
    return file.getvalue()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
