"""All parameter servers of a run, as one object for a worker.

Here: `ParameterServers`: starting the servers, pushing gradients, pulling parameters, the staleness gate. Not here:
when to push and pull (strategies), one shard's requests and replies (`channel.py`), splitting a gradient along the
shards (`outgoing.py`), background fetches (`prefetch.py`).

What blocks, and what does not:

- `push` and `tick` send and return. The next `push` on the same connection first waits until the last one was applied,
  because only then may its memory be reused. Servers handle requests in order, so a `pull` sees this worker's pushes.
- `prefetch` fetches on connections and a thread of its own, into memory of its own.
- A `gate` that did not open in time stays registered with the servers; calling again sends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from syncline.comms.parameter_server import messages as m
from syncline.comms.parameter_server.channel import Channel, Connector, await_replies
from syncline.comms.parameter_server.chunks import ParameterChunk, Span, chunks_in, overlap
from syncline.comms.parameter_server.optimizer import (
    HyperparameterChanges,
    dump_optimizer,
    flatten,
    optimizer_entries,
    param_group_indices,
    reshard_state,
)
from syncline.comms.parameter_server.outgoing import EncodedGradient, check_flat, split_gradient
from syncline.comms.parameter_server.prefetch import ParameterPrefetcher
from syncline.comms.serialize import bytes_to_tensor, dump_state, load_state
from syncline.comms.staleness import record
from syncline.compute.partition import cut_rows
from syncline.errors import ConfigError, PeerFailed

_GOODBYE_S = 30.0
_POLL_S = 0.2


class ParameterServers:
    """The servers of one run, as the worker of this `rank` uses them. For one thread.

    Vectors (`flat`, `out`) hold all parameters given to `begin`, one after the other, each in its memory order: a
    channels-last weight in channels-last order. They are float32, contiguous and on the CPU; they may be longer than
    the parameters, and the rest is ignored. Every wait raises `PeerFailed` after `timeout_s` without a sign of life, or
    when `should_stop()` turns true.
    """

    ranges: list[Span]
    """The part of the vector that each shard holds. Known after `begin`."""
    clock: int
    """How many steps this worker has finished."""
    cache_clock: int
    """The slowest worker's clock at the last `pull` or `take_prefetched`; see `syncline.comms.staleness.is_fresh`."""

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
        should_stop: Callable[[], bool] = lambda: False,
        only_asks: bool = False,
    ) -> None:
        """Connect to the shards, given in order. `share_memory=False` sends everything through sockets.

        `view` grows with each change of membership: the servers then drop the workers of earlier views. With
        `only_asks` this process is none of the workers: it may call `applied_steps`, and its end goes unnoticed.
        """
        if not addresses:
            raise ConfigError("There is no parameter server to connect to: the list of addresses is empty.")
        self.rank, self.size = rank, size
        self.ranges = []
        self.clock = self.cache_clock = 0
        self._share_memory, self._should_stop, self._only_asks = share_memory, should_stop, only_asks
        self._chunks: list[list[ParameterChunk]] = []
        self._hyperparameters: HyperparameterChanges | None = None
        self._staleness = _PushStaleness()
        self._gate: tuple[int, int] | None = None  # the clock and bound of the gate that was requested
        self._prefetcher: ParameterPrefetcher | None = None
        self._connector = Connector(
            addresses=list(addresses),
            secret=secret,
            rank=rank,
            size=size,
            view=view,
            timeout_s=timeout_s,
            should_stop=should_stop,
        )
        self._channels: list[Channel] = []
        try:
            for index in range(len(addresses)):
                self._channels.append(self._connector.connect(index, is_member=not only_asks))
        except BaseException:
            self.close(goodbye=False)
            raise

    @property
    def bytes_sent(self) -> int:
        """Bulk that this worker has sent to the servers, through sockets and shared memory."""
        return sum(channel.connection.bytes_sent for channel in self._connector.opened)

    @property
    def bytes_received(self) -> int:
        """Bulk that this worker has received from the servers, through sockets and shared memory."""
        return sum(channel.connection.bytes_received for channel in self._connector.opened)

    @property
    def uses_shared_memory(self) -> bool:
        """Whether bulk travels through shared memory to every shard."""
        return all(channel.connection.shared_buffer is not None for channel in self._channels)

    # Start and end

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
        mode: Literal["start", "join", "keep"] = "start",
    ) -> None:
        """Prepare the servers for these workers. `mode` says how:

            start    all workers of the view call it together. The servers start from rank 0's parameters and a copy of
                     its optimizer, with `state` from an earlier `state()` (of any number of shards), or else with the
                     state that rank 0's optimizer has. All clocks start at `clock`.
            keep     the same, but the servers keep the parameters and the optimizer that they have.
            join     one worker, a replacement, joins what the others have begun. Nothing is reset, and its clock
                     becomes at least the slowest worker's.

        `sparse` says which parameters get sparse gradients at the servers, as with `nn.Embedding(sparse=True)`. `rate`
        is the moving rate of rule "elastic".
        """
        shapes = [tuple(p.shape) for p in parameters]
        flags = [bool(s) for s in sparse] if sparse is not None else [False] * len(shapes)
        _check_begin(parameters, flags, rule, rate)
        _stop(self._prefetcher)
        self._prefetcher = None
        self._hyperparameters = HyperparameterChanges(optimizer)
        self.ranges = cut_rows(shapes, len(self._channels))
        self._chunks = [chunks_in(shapes, part, flags) for part in self.ranges]
        self._gate = None
        for channel, (low, high) in zip(self._channels, self.ranges, strict=True):
            channel.await_pushes()
            if self._share_memory:
                channel.offer_buffer(4 * (high - low))
        groups = param_group_indices(optimizer, parameters)
        is_source = self.rank == 0 and mode == "start"
        bulks: Iterable[list[Tensor]] = [[]] * len(self._channels)
        if is_source:
            bulks = _initial_bulks(parameters, optimizer, state, self.ranges, self._chunks)
        ids = []
        for channel, bulk in zip(self._channels, bulks, strict=True):
            values, pickled, saved = (t.nbytes for t in bulk) if bulk else (0, 0, 0)
            id_ = channel.expect()
            sizes = (values, pickled, saved)
            channel.connection.send(m.Begin(id_, rule, rate, clock, mode, shapes, flags, groups, sizes), bulk)
            ids.append(id_)
        replies = await_replies(self._channels, ids)
        for channel, reply in zip(self._channels, replies, strict=True):
            channel.version, channel.last_push = reply.version, 0
            channel.pending.clear()  # a gate from before will get no reply
        self.clock = max(reply.clock for reply in replies)
        self.cache_clock = min(reply.slowest for reply in replies)

    def applied_steps(self) -> dict[int, int] | None:
        """How many steps of each worker of the previous view the parameters contain.

        None if that is unknown: a server is new, or one has an update that another has not.
        """
        replies = await_replies(self._channels, [channel.request(m.AppliedSteps) for channel in self._channels])
        first = replies[0].applied_steps
        return first if first is not None and all(reply.applied_steps == first for reply in replies) else None

    def state(self) -> list[dict[str, Any]]:
        """The state of the servers' optimizers, one entry per shard; for a later `begin`, also with other shards.

        Tensors and numbers (`torch.load(weights_only=True)` reads it). One worker calls it, while no worker pushes.
        """
        found: list[dict[str, Any]] = []
        for channel in self._channels:
            channel.await_pushes()
            data: list[bytes] = []
            id_ = channel.expect(copy_to=data)
            channel.connection.send(m.SaveState(id_))
            channel.await_reply(id_)
            found.append(load_state(data[0]))
        return found

    def close(self, *, goodbye: bool = True) -> None:
        """Wait until all pushes were applied, then disconnect. `goodbye=False` disconnects at once."""
        _stop(self._prefetcher)
        self._prefetcher = None
        channels, self._channels = self._channels, []
        try:
            if goodbye and not self._only_asks:
                for channel in channels:
                    channel.connection.timeout_s = min(channel.connection.timeout_s, _GOODBYE_S)
                    channel.await_pushes()
                await_replies(channels, [channel.request(m.Goodbye) for channel in channels])
        except PeerFailed:
            pass  # a server that has failed needs no goodbye
        finally:
            for channel in channels:
                channel.close()

    def __enter__(self) -> ParameterServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(goodbye=error is None)

    # Gradients

    def push(
        self,
        gradient: Tensor | EncodedGradient,
        *,
        weight: float,
        ranges: Sequence[Span] | None = None,
        rows: Mapping[int, Tensor] | None = None,
        ticks: int = 1,
    ) -> None:
        """Rule "apply": send the gradient and advance the clock by `ticks`. A tensor may be overwritten at once.

        `ranges` (ascending and disjoint): only these parts travel. Parameters outside of them are left alone, as torch
        leaves parameters without a gradient; a parameter that is partly inside has zeros elsewhere.

        `rows`, by index of the parameter (int64, any order): of these parameters only the touched rows travel.
        """
        outgoing = split_gradient(gradient, self.ranges, self._chunks, ranges=ranges, rows=rows)
        assert self._hyperparameters is not None, "begin comes first"
        changed = self._hyperparameters.take()
        self.clock += ticks
        on_push = self._staleness.track(len(self._channels))
        for channel, (update, bulk) in zip(self._channels, outgoing, strict=True):
            channel.await_pushes()
            id_ = channel.expect(on_push=on_push)
            channel.last_push = id_
            channel.connection.send(m.Push(id_, self.clock, weight, channel.version, update, changed), bulk)

    def collect(
        self,
        gradient: Tensor | EncodedGradient,
        piggybacked: Tensor,
        *,
        weight: float,
        clip_norm: float | None = None,
        rows: Mapping[int, Tensor] | None = None,
        out: Tensor | None = None,
        ticks: int = 1,
    ) -> None:
        """Rule "collect": send the gradient, and wait until the servers have applied the sum over all workers.

        `piggybacked` (a few float32 numbers, the loss first) is overwritten by its weighted sum over all workers; if
        the summed loss is not finite, the servers apply nothing. `clip_norm` limits the norm of the summed gradient,
        which only a single shard can know. `out` is overwritten by the new parameters: a `pull` without a second round
        trip. The rest is as in `push`.
        """
        if clip_norm is not None and len(self._channels) > 1:
            raise ConfigError(
                f"clip_norm needs the norm of the whole gradient, but it is spread over {len(self._channels)} servers. "
                "Use one server, or train without clip_norm.",
                code="clip-norm-needs-one-server",
                servers=len(self._channels),
            )
        outgoing = split_gradient(gradient, self.ranges, self._chunks, rows=rows)
        assert self._hyperparameters is not None, "begin comes first"
        changed = self._hyperparameters.take()
        self.clock += ticks
        ids = []
        for channel, part, (update, bulk) in zip(self._channels, self.ranges, outgoing, strict=True):
            channel.await_pushes()
            id_ = channel.expect([] if out is None else [check_flat(out, part[1])[slice(*part)]])
            wants = out is not None
            message = m.Collect(id_, self.clock, weight, piggybacked.tolist(), clip_norm, wants, update, changed)
            channel.connection.send(message, bulk)
            ids.append(id_)
        replies = await_replies(self._channels, ids)
        piggybacked.copy_(torch.tensor(replies[0].piggybacked, dtype=torch.float32))
        if out is not None:
            self._note_read(replies)

    def tick(self, ticks: int = 1) -> None:
        """Advance the clock without a gradient."""
        self.clock += ticks
        for channel in self._channels:
            channel.connection.send(m.Tick(self.clock))

    # Parameters

    def pull(self, out: Tensor, ranges: Sequence[Span] | None = None) -> None:
        """Overwrite `out`, or these ranges of it, with the servers' parameters, which contain this worker's pushes."""
        ids = []
        for channel, part in zip(self._channels, self.ranges, strict=True):
            spans = [part] if ranges is None else [c for span in ranges if (c := overlap(span, part))]
            relative = None if ranges is None else [(low - part[0], high - part[0]) for low, high in spans]
            id_ = channel.expect([check_flat(out, high)[low:high] for low, high in spans])
            channel.connection.send(m.Pull(id_, 0, relative))
            ids.append(id_)
        self._note_read(await_replies(self._channels, ids))

    def prefetch(self) -> None:
        """Start fetching the parameters in the background; they will contain this worker's pushes so far.

        Does nothing while a fetch is in progress. Replaces one that is complete but was not taken.
        """
        if self._prefetcher is None:
            numels = [high - low for low, high in self.ranges]
            channels = [self._connector.connect(index, is_member=False) for index in range(len(numels))]
            if self._share_memory:
                for channel, numel in zip(channels, numels, strict=True):
                    channel.offer_buffer(4 * numel)
            self._prefetcher = ParameterPrefetcher(channels, numels)
        self._prefetcher.start([channel.last_push for channel in self._channels])

    def take_prefetched(self, out: Tensor, timeout_s: float = 0.0) -> bool:
        """If a `prefetch` completes within `timeout_s`, overwrite `out` with its result and return True."""
        if self._prefetcher is None or not (replies := self._prefetcher.take(timeout_s)):
            return False
        for part, fetched in zip(self.ranges, self._prefetcher.fetched, strict=True):
            check_flat(out, part[1])[slice(*part)].copy_(fetched)
        self._note_read(replies)
        return True

    def pull_elastic(self, flat: Tensor, clock: int = 0) -> None:
        """Rule "elastic": this worker, at `flat` after `clock` steps, and the center move toward each other.

        `flat` becomes flat - d.
        """
        moves = torch.empty(self.ranges[-1][1])
        ids = []
        for channel, part in zip(self._channels, self.ranges, strict=True):
            channel.await_pushes()
            id_ = channel.expect([moves[slice(*part)]])
            channel.connection.send(m.Elastic(id_, clock), [check_flat(flat, part[1])[slice(*part)]])
            ids.append(id_)
        self._note_read(await_replies(self._channels, ids))
        flat[: moves.numel()].sub_(moves)

    # Staleness

    def gate(self, bound: int, timeout_s: float) -> bool:
        """Whether, within `timeout_s`, no worker is more than `bound` steps behind this one, as every shard sees it.

        If False, call again, after other calls if need be: the request stays with the servers.
        """
        if self._gate != (self.clock, bound):
            self._gate = (self.clock, bound)
            for channel in self._channels:
                channel.gate = channel.request(lambda id_: m.Gate(id_, self.clock, bound))
        deadline = time.monotonic() + timeout_s
        for channel in self._channels:
            while channel.gate in channel.pending:
                left = deadline - time.monotonic()
                if channel.connection.is_readable(min(max(left, 0.0), _POLL_S)):
                    channel.receive()
                elif left <= 0:
                    return False
                elif self._should_stop():
                    what = channel.connection.what
                    raise PeerFailed(f"The run was aborted while this worker waited at the staleness gate of {what}.")
            if channel.gate in channel.errors:
                raise channel.errors.pop(channel.gate)
        self._gate = None
        return True

    def take_staleness(self) -> dict[int, int]:
        """How many updates had which staleness (the largest over the shards), of those applied since the last call."""
        for channel in self._channels:
            while channel.has_pending_pushes and channel.connection.is_readable(0.0):
                channel.receive()
        return self._staleness.take()

    def _note_read(self, replies: Sequence[m.Reply]) -> None:
        """Remember the versions of the parameters that this worker has just read."""
        for channel, reply in zip(self._channels, replies, strict=True):
            channel.version = reply.version
        self.cache_clock = min(reply.slowest for reply in replies)


class _PushStaleness:
    """Combines the shards' replies to each push into one histogram."""

    def __init__(self) -> None:
        self._histogram: dict[int, int] = {}

    def track(self, shards: int) -> Callable[[m.Reply], None]:
        """A handler for the replies of this many shards to one push."""
        missing, largest = shards, -1

        def on_reply(reply: m.Reply) -> None:
            nonlocal missing, largest
            missing, largest = missing - 1, max(largest, reply.staleness)
            if not missing and largest >= 0:
                self._histogram = record(self._histogram, largest)

        return on_reply

    def take(self) -> dict[int, int]:
        taken, self._histogram = self._histogram, {}
        return taken


def _stop(prefetcher: ParameterPrefetcher | None) -> None:
    if prefetcher is not None:
        prefetcher.close()


def _check_begin(parameters: Sequence[Tensor], sparse: Sequence[bool], rule: str, rate: float) -> None:
    wrong = next((p for p in parameters if p.dtype != torch.float32 or p.device.type != "cpu"), None)
    if wrong is not None:
        raise ConfigError(
            f"Parameter servers hold float32 tensors on the CPU, but the model has a parameter of {wrong.dtype} on "
            f"{wrong.device}. Convert the model with model.float(), or use a strategy without servers.",
            code="server-needs-float32",
            dtype=str(wrong.dtype),
            device=str(wrong.device),
        )
    if len(sparse) != len(parameters):
        raise ConfigError(f"sparse has {len(sparse)} entries for {len(parameters)} parameters. Give one for each.")
    if rule == "elastic" and not 0 < rate <= 1:
        raise ConfigError(
            f"The rate of rule 'elastic' is {rate}, but it must be above 0 and at most 1.", setting="rate", value=rate
        )


def _initial_bulks(
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    state: Sequence[Mapping[str, Any]] | None,
    ranges: Sequence[Span],
    chunks: Sequence[Sequence[ParameterChunk]],
) -> Iterable[list[Tensor]]:
    """For each shard: its parameters, the optimizer, the optimizer's state."""
    flat = torch.cat([flatten(p) for p in parameters]) if parameters else torch.empty(0)
    pickled = bytes_to_tensor(dump_optimizer(optimizer))
    if state is None:
        version, entries = 0, optimizer_entries(optimizer, parameters)
    else:
        version = max((int(s["version"]) for s in state), default=0)
        entries = [entry for s in state for entry in s["chunks"]]
    for part, own_chunks in zip(ranges, chunks, strict=True):
        own = reshard_state(entries, own_chunks)
        saved = dump_state({"version": version, "clocks": {}, "chunks": own}) if version or own else b""
        yield [flat[slice(*part)], pickled, bytes_to_tensor(saved)]
