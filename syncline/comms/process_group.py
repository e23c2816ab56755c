"""Collectives through torch.distributed: gloo between CPUs, NCCL between GPUs, on one host or many.

Here: `ProcessGroup`, a `Collective` on torch's own process groups. What is split from one is another; or, where all of
its members are on one host, a collective through that host's memory (`shared_memory.py`). Not here: the store through
which the ranks find each other, which lives with the coordinator (`store.py`), so that no worker's death takes it away.

gloo cannot be told to give up a call: it waits for the other end of a connection, or until the time of the exchange is
over, and a host that vanishes closes no connection. So each group knows which connections gloo has opened for it, and
`abort` ends them. That is not always enough: what gloo is about to send at the moment when a connection ends it
forgets, and then waits for it in vain. A call that has not ended soon after the abort is left behind, with its group.

Groups are made directly, and torch's default group stays free. There is only one of that in a process, also when an
attempt to make it hangs; and torch names groups by counting them, attempts that failed included, so that ranks with
different pasts would not find each other.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not export them by name

from syncline.comms.collective import Collective, Solo, check_mixing, mixed, takers
from syncline.comms.layout import ControlLayout
from syncline.comms.segment import Segment, machine_here
from syncline.comms.shared_memory import SharedMemory
from syncline.comms.sockets import connections, interface_of
from syncline.errors import ConfigError, PeerLost

__all__ = ["ProcessGroup"]

_CONNECT_S = 10.0
"""How long the ranks, all of them there, may take to connect; gloo takes it for each of its attempts."""
_LOOK_EVERY_S = 0.1
"""How often a call that goes on looks whether it should."""
_GRACE_S = 0.25
"""How long gloo has to notice that its connections have ended."""
_left_behind: list[object] = []
"""Groups with a call that did not end. Whoever takes one apart waits for that call."""


class ProcessGroup:
    """A `Collective` over a new process group of torch.distributed.

    `host` is the address at which the other ranks reach this one; without it, torch's own settings decide.
    `should_stop` says when there is nobody to wait for any more, also before anybody could call `abort`.
    `memory_bytes` is how much memory ranks on one host may share in what is split from this; 0 if they may not.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float = 300.0,
        host: str | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        memory_bytes: int = 0,
    ) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = 0
        self._memory_bytes = memory_bytes if device.type == "cpu" else 0
        self._store, self._device, self._timeout_s = store, device, timeout_s
        self._group: Any = None
        self._opened: frozenset[int] = frozenset()  # connections, by their numbers in the kernel
        self._should_stop = should_stop
        self._aborted = False
        self._leaves_at: float | None = None
        self._is_left = False
        self._splits = 0
        self._children: list[Collective] = []
        try:
            self._do(lambda: self._connect(host))
            # Who left now would look, to one that is still connecting, as if it had died; and NCCL wants its first call
            # made by all, which a `mix_` may not be.
            self.barrier()
        except BaseException:
            self.close()
            raise

    @property
    def waited_s(self) -> float:
        """In what was split from here and goes through memory; torch.distributed does not tell waiting from sending."""
        return sum(child.waited_s for child in self._children)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory: the transport copies as it sends."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def share(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Not possible, and said so."""
        del numel, dtype
        raise ConfigError(
            "These workers have no memory in common: they exchange through torch.distributed. Let workers on one host "
            "use the shared-memory collective, or choose a strategy that sends what it shares."
        )

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Scale, then all-reduce."""
        self.bytes_sent += tensor.nbytes
        data = tensor.detach()
        contiguous = data.contiguous()  # gloo would take the memory of a strided tensor as it lies, gaps included
        if weight != 1.0:
            contiguous.mul_(weight)
        self._do(lambda: dist.all_reduce(contiguous, group=self._group, async_op=True))
        if contiguous.data_ptr() != data.data_ptr():
            data.copy_(contiguous)

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        """Only those who take from each other talk."""
        check_mixing(tensor, mixing, self.size)
        to = takers(mixing, self.rank)
        self.bytes_sent += tensor.nbytes * len(to)
        data = tensor.detach()
        values = {self.rank: data.contiguous()}
        weights = mixing[self.rank]
        values |= {r: torch.empty_like(values[self.rank]) for r in weights if r != self.rank}
        self._do(lambda: self._apart(lambda: self._talk(values, to if tensor.numel() else [])))
        data.copy_(mixed(values, weights))

    def _talk(self, values: Mapping[int, torch.Tensor], to: list[int]) -> None:
        """Send this rank's value to some, and fill in those of the others."""
        works = []
        for peer in sorted({*values, *to} - {self.rank}):
            # NCCL makes two ranks' messages to each other wait for their turn, so one must send while the other takes.
            for sends in (True, False) if self.rank < peer else (False, True):
                if sends and peer in to:
                    works.append(dist.isend(values[self.rank], group=self._group, group_dst=peer))
                elif not sends and peer in values and values[peer].numel():
                    works.append(dist.irecv(values[peer], group=self._group, group_src=peer))
        for work in works:
            assert work is not None, "torch gives no work only to those outside the group"
            work.wait()

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """From `source` to all."""
        self.bytes_sent += tensor.nbytes if self.rank == source else 0
        data = tensor.detach()
        contiguous = data.contiguous()
        self._do(lambda: dist.broadcast(contiguous, group=self._group, group_src=source, async_op=True))
        if contiguous.data_ptr() != data.data_ptr():
            data.copy_(contiguous)

    def gather(self, payload: bytes) -> list[bytes]:
        """Lengths first, then everybody's bytes padded to the longest."""
        self.bytes_sent += len(payload)
        return self._gather(payload)

    def barrier(self) -> None:
        """Wait for every rank."""
        nothing = torch.zeros(1, device=self._device)
        self._do(lambda: dist.all_reduce(nothing, group=self._group, async_op=True))

    def hosts(self) -> list[int]:
        """By what each rank knows of the machine it is on."""
        names = self._gather(machine_here().encode())
        seen = list(dict.fromkeys(names))
        return [seen.index(name) for name in names]

    def split(self, color: int) -> Collective:
        """A process group of its own for each color, through the same store, or memory; none for a rank alone."""
        colors = [int(text) for text in self._gather(b"%d" % color)]
        members = [r for r, theirs in enumerate(colors) if theirs == color]
        self._splits += 1
        # All ranks take part in finding out who can share memory, those alone as well.
        child: Collective | None = self._in_memory(members) if self._memory_bytes else None
        if len(members) == 1:
            child = Solo()
        if child is None:
            child = ProcessGroup(
                PrefixStore(f"split-{self._splits}-{color}", self._store),
                rank=members.index(self.rank),
                size=len(members),
                device=self._device,
                timeout_s=self._timeout_s,
                should_stop=self._is_over,
                memory_bytes=self._memory_bytes,
            )
        self._children.append(child)
        if self._aborted:  # perhaps just now, by a thread that did not find the child yet
            child.abort()
        return child

    def abort(self) -> None:
        """Make calls in progress and later ones raise, here and at the ranks that are connected to this one."""
        self._aborted = True
        for child in self._children:
            child.abort()
        for number, connection in connections() if self._opened else ():
            if number in self._opened:
                # As if the other end had closed it. Who could not write any more either would more often come upon what
                # gloo forgets.
                with contextlib.suppress(OSError):  # the other end, or gloo, was quicker
                    connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Leave the process group."""
        for child in self._children:
            child.close()
        self._children.clear()
        if self._is_left:
            _left_behind.append((self._group, self._store))
        self._group = None  # frees the connections
        self._aborted = True

    def _is_over(self) -> bool:
        return self._aborted or self._should_stop()

    def _in_memory(self, members: list[int]) -> SharedMemory | None:
        """A collective of these ranks through the memory of their host; None if they have none in common."""
        hosts = self.hosts()
        is_one_host = len(members) > 1 and len({hosts[r] for r in members}) == 1
        control: Segment | None = None
        if is_one_host and self.rank == members[0]:
            with contextlib.suppress(OSError):  # no memory left: they find no address, and do without
                control = Segment.create(ControlLayout(len(members)).total_bytes, "syncline-host")
        try:
            addresses = self._gather(control.address.encode() if control else b"")
            if is_one_host and control is None and (address := addresses[members[0]].decode()):
                with contextlib.suppress(OSError):  # another user's process, perhaps
                    control = Segment.attach(address)
            attached = self._gather(b"yes" if control else b"")
        finally:
            if control is not None:
                control.close_descriptor()
        if control is None or not all(attached[r] for r in members):
            return None
        return SharedMemory(
            control,
            rank=members.index(self.rank),
            size=len(members),
            timeout_s=self._timeout_s,
            limit_bytes=self._memory_bytes,
            members=members,
            is_over=self._is_over,
        )

    def _connect(self, host: str | None) -> None:
        store, rank, size, timeout = self._store, self.rank, self.size, timedelta(seconds=self._timeout_s)
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            return
        if host is not None and (interface := interface_of(host)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # for this group, and for those split from it
        # Some may still be busy elsewhere, and that can take long; a wait for the store can be called off.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{r}" for r in range(size)], timeout)
        before, made = _open_connections(), list[Any]()
        limit = timedelta(seconds=min(_CONNECT_S, self._timeout_s))
        self._apart(lambda: made.append(dist.ProcessGroupGloo(store, rank, size, limit)))
        self._opened = _open_connections() - before
        self._group = made[0]
        self._group._set_default_timeout(timeout)

    def _gather(self, payload: bytes) -> list[bytes]:
        length = torch.tensor([len(payload)], device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(lengths, length, group=self._group, async_op=True))
        counts = [int(n) for n in lengths]
        longest = max(counts)
        if longest == 0:
            return [b""] * self.size
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        mine = mine.to(self._device)
        parts = [torch.zeros_like(mine) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(parts, mine, group=self._group, async_op=True))
        return [bytes(p[:n].cpu().numpy()) for p, n in zip(parts, counts, strict=True)]

    def _do(self, call: Callable[[], Any]) -> None:
        """Make a call of torch.distributed, and see the work that it gives, if any, to its end."""
        if self._aborted:
            raise PeerLost("The exchange was aborted because another worker is gone.")
        try:
            work = call()
            if work is not None:
                self._await(work)
        except (RuntimeError, ValueError) as error:  # gloo reports a lost peer as a plain RuntimeError
            # Where torch did not register the group itself, its own logging of that error raises another one.
            lost = error.__context__ if isinstance(error, ValueError) else error
            if not isinstance(lost, RuntimeError):
                raise
            self.abort()  # others may be waiting for this rank, and not know of the one that is lost
            raise PeerLost(f"The exchange failed: {lost}") from lost

    def _await(self, work: Any) -> None:
        if self._device.type == "cuda":
            work.wait()  # it is in the stream's order; NCCL looks after its own time
            return
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_EVERY_S))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what went wrong, if anything has
                    return
                self._leave_if_over()

    def _apart(self, call: Callable[[], object]) -> None:
        """A call that waits inside gloo, in a thread of its own, so that it can be left behind."""
        if self._device.type == "cuda":
            call()
            return
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                call()
                outcome.put(None)
            except BaseException as error:
                outcome.put(error)

        threading.Thread(target=run, name="gloo-call", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                error = outcome.get(timeout=_LOOK_EVERY_S)
                break
            self._leave_if_over()
        if error is not None:
            raise error

    def _leave_if_over(self) -> None:
        """A call goes on: end it if there is nobody to wait for any more, and leave it if it has not ended by then."""
        if not self._is_over():
            return
        now = time.monotonic()
        if self._leaves_at is None:
            self.abort()
            self._leaves_at = now + _GRACE_S
        elif now > self._leaves_at:
            self._is_left = True
            raise PeerLost("The exchange was given up because another worker is gone.")


def _open_connections() -> frozenset[int]:
    return frozenset(number for number, _ in connections())
