"""Collectives through torch.distributed: gloo between CPUs, NCCL between GPUs, on one host or many.

Here: `ProcessGroup`, a `Collective` on torch's own process groups. What is split from one is another; or, where all of
its members are on one host, a collective through that host's memory (`shared_memory.py`). Not here: making groups and
interrupting their calls (`torch_group.py`), and the store through which the ranks find each other (`store.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not export them by name

from syncline.comms.collective import Collective, Solo, check_mixing, mixed, takers
from syncline.comms.segment import ControlLayout, Segment, machine_here
from syncline.comms.serialize import bytes_to_tensor
from syncline.comms.shared_memory import SharedMemory
from syncline.comms.torch_group import TorchGroup
from syncline.errors import ConfigError


class ProcessGroup:
    """A `Collective` over a new process group of torch.distributed.

    `host` is the address at which the other ranks reach this one; without it, torch's own settings decide.
    `should_stop` says when to give up a call, also before a thread could call `abort`. `memory_bytes` is how much
    memory ranks on one host may share in collectives split from this one; 0 if they may not.
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
        self._splits = 0
        self._children: list[Collective] = []
        self._group = TorchGroup(
            store, rank, size, device=device, timeout_s=timeout_s, host=host, should_stop=should_stop
        )
        try:
            # To a rank that is still connecting, one that leaves now would look as if it had failed; and NCCL wants its
            # first call made by all ranks, which a `mix_` may not be.
            self.barrier()
        except BaseException:
            self.close()
            raise

    @property
    def waited_s(self) -> float:
        """Only in children that use shared memory: torch.distributed does not separate waiting from sending."""
        return sum(child.waited_s for child in self._children)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory: the transport copies as it sends."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        del numel, dtype
        raise ConfigError(
            "These workers share no memory: they exchange through torch.distributed. Run them on one host with the "
            "shared-memory collective, or choose a strategy that does not need shared memory.",
            code="no-shared-memory",
        )

    def all_reduce_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        self.bytes_sent += tensor.nbytes
        data = tensor.detach()
        contiguous = data.contiguous()  # gloo would take the memory of a strided tensor as it lies, gaps included
        if weight != 1.0:
            contiguous.mul_(weight)
        self._group.call(lambda: dist.all_reduce(contiguous, group=self._group.group, async_op=True))
        if contiguous.data_ptr() != data.data_ptr():
            data.copy_(contiguous)

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        """Only ranks that take from each other communicate."""
        check_mixing(tensor, mixing, self.size)
        to = takers(mixing, self.rank)
        self.bytes_sent += tensor.nbytes * len(to)
        data = tensor.detach()
        values = {self.rank: data.contiguous()}
        weights = mixing[self.rank]
        values |= {r: torch.empty_like(values[self.rank]) for r in weights if r != self.rank}
        self._group.call(lambda: self._group.call_in_thread(lambda: self._swap(values, to if tensor.numel() else [])))
        data.copy_(mixed(values, weights))

    def _swap(self, values: Mapping[int, torch.Tensor], to: list[int]) -> None:
        """Send this rank's value to some ranks, and receive the other ranks' values."""
        own = values[self.rank]
        others = {peer: value for peer, value in values.items() if peer != self.rank and value.numel()}
        self._pass(dict.fromkeys([peer for peer in to if peer != self.rank], own), others)

    def swap(self, outgoing: Mapping[int, np.ndarray], sources: Sequence[int]) -> dict[int, np.ndarray]:
        """Send bytes to some ranks, and receive those of others, which must call this, too: lengths first."""
        self.bytes_sent += sum(data.nbytes for data in outgoing.values())
        lengths = {peer: torch.tensor([data.nbytes], device=self._device) for peer, data in outgoing.items()}
        counts = {peer: torch.zeros(1, dtype=torch.int64, device=self._device) for peer in sources}
        self._group.call(lambda: self._group.call_in_thread(lambda: self._pass(lengths, counts)))
        sent = {peer: torch.from_numpy(data).to(self._device) for peer, data in outgoing.items() if data.nbytes}
        taken = {p: torch.empty(int(n), dtype=torch.uint8, device=self._device) for p, n in counts.items() if int(n)}
        self._group.call(lambda: self._group.call_in_thread(lambda: self._pass(sent, taken)))
        return {peer: taken[peer].cpu().numpy() if peer in taken else np.empty(0, np.uint8) for peer in sources}

    def _pass(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        works = []
        for peer in sorted({*outgoing, *incoming}):
            # NCCL runs two ranks' messages to each other one by one, so one must send while the other receives.
            for sends in (True, False) if self.rank < peer else (False, True):
                if sends and peer in outgoing:
                    works.append(dist.isend(outgoing[peer], group=self._group.group, group_dst=peer))
                elif not sends and peer in incoming:
                    works.append(dist.irecv(incoming[peer], group=self._group.group, group_src=peer))
        for work in works:
            assert work is not None, "torch gives no work only to those outside the group"
            work.wait()

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        self.bytes_sent += tensor.nbytes if self.rank == source else 0
        data = tensor.detach()
        contiguous = data.contiguous()
        self._group.call(lambda: dist.broadcast(contiguous, group=self._group.group, group_src=source, async_op=True))
        if contiguous.data_ptr() != data.data_ptr():
            data.copy_(contiguous)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Lengths first, then all payloads, padded to the longest."""
        self.bytes_sent += len(payload)
        return self._gather(payload)

    def barrier(self) -> None:
        nothing = torch.zeros(1, device=self._device)
        self._group.call(lambda: dist.all_reduce(nothing, group=self._group.group, async_op=True))

    def hosts(self) -> list[int]:
        names = self._gather(machine_here().encode())
        seen = list(dict.fromkeys(names))
        return [seen.index(name) for name in names]

    def split(self, color: int) -> Collective:
        """For each color a process group through the same store, or shared memory; `Solo` for a rank alone."""
        colors = [int(text) for text in self._gather(b"%d" % color)]
        members = [r for r, theirs in enumerate(colors) if theirs == color]
        self._splits += 1
        # All ranks take part in finding out which can share memory, those alone as well.
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
                should_stop=self._group.is_over,
                memory_bytes=self._memory_bytes,
            )
        self._children.append(child)
        if self._group.is_aborted:  # perhaps just now, by a thread that did not see the child yet
            child.abort()
        return child

    def abort(self) -> None:
        """Make calls in progress and later ones raise, here and at the ranks that are connected to this one."""
        for child in self._children:
            child.abort()
        self._group.abort()

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._children.clear()
        self._group.close()

    def _in_memory(self, members: list[int]) -> SharedMemory | None:
        """A collective of these ranks through the memory of their host; None if they cannot share any."""
        hosts = self.hosts()
        is_one_host = len(members) > 1 and len({hosts[r] for r in members}) == 1
        control: Segment | None = None
        if is_one_host and self.rank == members[0]:
            with contextlib.suppress(OSError):  # out of memory: the members find no address, and use a process group
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
            is_over=self._group.is_over,
        )

    def _gather(self, payload: bytes) -> list[bytes]:
        length = torch.tensor([len(payload)], device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._group.call(lambda: dist.all_gather(lengths, length, group=self._group.group, async_op=True))
        counts = [int(n) for n in lengths]
        longest = max(counts)
        if longest == 0:
            return [b""] * self.size
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = bytes_to_tensor(payload)
        mine = mine.to(self._device)
        parts = [torch.zeros_like(mine) for _ in range(self.size)]
        self._group.call(lambda: dist.all_gather(parts, mine, group=self._group.group, async_op=True))
        return [bytes(p[:n].cpu().numpy()) for p, n in zip(parts, counts, strict=True)]
