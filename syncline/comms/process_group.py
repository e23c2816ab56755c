"""Collectives through torch.distributed: gloo between CPUs, NCCL between GPUs, on one host or many.

Here: `ProcessGroup`, a `Collective` on torch's own process groups. Not here: the store through which the ranks find
each other, which lives with the coordinator (`store.py`), so that no worker's death takes it away.

The first group is torch's default one. Those split from it are made directly, not by `dist.new_group`: that one counts
the groups of the whole process to name a new one, so ranks that were split apart before could no longer agree on names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not export them by name

from syncline.comms.collective import Collective, Solo, check_mixing, mixed, takers
from syncline.errors import ConfigError, PeerLost

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """A `Collective` over a new default process group of torch.distributed, or over `group`, which it then owns."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float = 300.0,
        group: Any = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = 0
        self._store, self._device, self._timeout_s = store, device, timeout_s
        self._group = group  # None is torch's default group
        self._aborted = False
        self._splits = 0
        self._children: list[Collective] = []
        if group is None:
            backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
            self._do(lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout))
            self.barrier()  # who left now would look, to one that is still connecting, as if it had died

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
        self._do(lambda: dist.all_reduce(contiguous, group=self._group))
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
        self._do(lambda: self._talk(values, to if tensor.numel() else []))
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
        self._do(lambda: dist.broadcast(contiguous, group=self._group, group_src=source))
        if contiguous.data_ptr() != data.data_ptr():
            data.copy_(contiguous)

    def gather(self, payload: bytes) -> list[bytes]:
        """Lengths first, then everybody's bytes padded to the longest."""
        self.bytes_sent += len(payload)
        return self._gather(payload)

    def barrier(self) -> None:
        """Wait for every rank."""
        self._do(lambda: dist.all_reduce(torch.zeros(1, device=self._device), group=self._group))

    def split(self, color: int) -> Collective:
        """A process group of its own for each color, through the same store; none for a rank alone."""
        colors = [int(text) for text in self._gather(b"%d" % color)]
        members = [r for r, theirs in enumerate(colors) if theirs == color]
        self._splits += 1
        child: Collective = Solo()
        if len(members) > 1:
            child = self._connect(members, PrefixStore(f"split-{self._splits}-{color}", self._store))
        self._children.append(child)
        if self._aborted:  # perhaps just now, by a thread that did not find the child yet
            child.abort()
        return child

    def abort(self) -> None:
        """Later calls raise at once; a call in progress ends when the peer's connection does (gloo cannot be woken)."""
        self._aborted = True
        for child in self._children:
            child.abort()

    def close(self) -> None:
        """Leave the process group."""
        for child in self._children:
            child.close()
        self._children.clear()
        if self._group is not None:
            self._group = None  # frees the connections
            self._aborted = True  # or a later call would go to the default group
        elif dist.is_initialized():
            dist.destroy_process_group()

    def _connect(self, members: list[int], store: Store) -> ProcessGroup:
        rank, size, timeout = members.index(self.rank), len(members), timedelta(seconds=self._timeout_s)
        groups: list[Any] = []
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._do(lambda: groups.append(dist.ProcessGroupNCCL(store, rank, size, options)))
        else:
            self._do(lambda: groups.append(dist.ProcessGroupGloo(store, rank, size, timeout)))
        child = ProcessGroup(
            store, rank=rank, size=size, device=self._device, timeout_s=self._timeout_s, group=groups[0]
        )
        child.barrier()  # NCCL wants its first call made by all, which a `mix_` may not be
        return child

    def _gather(self, payload: bytes) -> list[bytes]:
        length = torch.tensor([len(payload)], device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(lengths, length, group=self._group))
        counts = [int(n) for n in lengths]
        longest = max(counts)
        if longest == 0:
            return [b""] * self.size
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        mine = mine.to(self._device)
        parts = [torch.zeros_like(mine) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(parts, mine, group=self._group))
        return [bytes(p[:n].cpu().numpy()) for p, n in zip(parts, counts, strict=True)]

    def _do(self, call: Callable[[], object]) -> None:
        if self._aborted:
            raise PeerLost("The exchange was aborted because another worker is gone.")
        try:
            call()
        except RuntimeError as error:  # gloo reports a lost peer as a plain RuntimeError
            raise PeerLost(f"The exchange failed: {error}") from error
