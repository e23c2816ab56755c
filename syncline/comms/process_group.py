"""Collectives through torch.distributed: gloo between CPUs, NCCL between GPUs, on one host or many.

Here: `ProcessGroup`, a `Collective` on torch's own process groups. Not here: the store through which the ranks find
each other, which lives with the coordinator (`store.py`), so that no worker's death takes it away.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not export it by name

from syncline.errors import PeerLost

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """A `Collective` over a new default process group of torch.distributed."""

    def __init__(self, store: Store, *, rank: int, size: int, device: torch.device, timeout_s: float = 300.0) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = 0
        self._device = device
        self._aborted = False
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory: the transport copies as it sends."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Scale, then all-reduce."""
        self.bytes_sent += tensor.nbytes
        data = tensor.detach()
        contiguous = data.contiguous()  # gloo would take the memory of a strided tensor as it lies, gaps included
        if weight != 1.0:
            contiguous.mul_(weight)
        self._do(lambda: dist.all_reduce(contiguous))
        if contiguous.data_ptr() != data.data_ptr():
            data.copy_(contiguous)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """From `source` to all."""
        self.bytes_sent += tensor.nbytes if self.rank == source else 0
        data = tensor.detach()
        contiguous = data.contiguous()
        self._do(lambda: dist.broadcast(contiguous, source))
        if contiguous.data_ptr() != data.data_ptr():
            data.copy_(contiguous)

    def gather(self, payload: bytes) -> list[bytes]:
        """Lengths first, then everybody's bytes padded to the longest."""
        self.bytes_sent += len(payload)
        length = torch.tensor([len(payload)], device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(lengths, length))
        counts = [int(n) for n in lengths]
        longest = max(counts)
        if longest == 0:
            return [b""] * self.size
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        mine = mine.to(self._device)
        parts = [torch.zeros_like(mine) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(parts, mine))
        return [bytes(p[:n].cpu().numpy()) for p, n in zip(parts, counts, strict=True)]

    def barrier(self) -> None:
        """Wait for every rank."""
        self._do(lambda: dist.all_reduce(torch.zeros(1, device=self._device)))

    def abort(self) -> None:
        """Later calls raise at once; a call in progress ends when the peer's connection does (gloo cannot be woken)."""
        self._aborted = True

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _do(self, call: Callable[[], object]) -> None:
        if self._aborted:
            raise PeerLost("The exchange was aborted because another worker is gone.")
        try:
            call()
        except RuntimeError as error:  # gloo reports a lost peer as a plain RuntimeError
            raise PeerLost(f"The exchange failed: {error}") from error
