"""Collectives between processes of one host, through memory that all of them map.

Here: `SharedMemory`, a `Collective`. Not here: where the memory comes from (`segment.py`), how ranks wait for each
other (`barrier.py`).

A tensor from `allocate` lies in shared memory on every rank. `sum_` splits it into one piece per rank; each rank adds
up its own piece from everybody's copy, in rank order, and writes the result back into every copy. Nobody else touches
that piece between the two barriers, so nothing is copied in or out and all ranks end up with the same bits.

Tensors from elsewhere pass through a small staging area; there, two halves used in turn save the second barrier: a
rank can only write a half again after everybody has arrived at the call in between, and so has finished reading it.
"""

from __future__ import annotations

import math
import os
import struct

import torch

from syncline.algorithms.partition import split
from syncline.comms.barrier import SharedBarrier
from syncline.comms.layout import NOTICE_BYTES, STAGE_BYTES, ControlLayout
from syncline.comms.segment import Segment
from syncline.errors import PeerLost, SynclineError

__all__ = ["SharedMemory", "SharedMemoryFull"]

_CHUNK_ELEMENTS = 32 * 1024  # a piece of this size and its partners stay in a core's own cache
_SPIN_S = 100e-6
_ALIGN_ELEMENTS = 64

_SLOT = struct.Struct("<dQ")  # a rank's weight; the length of what it staged


class SharedMemoryFull(SynclineError):
    """There is not enough memory to share; the caller may fall back to another collective."""


class SharedMemory:
    """A `Collective` over a zeroed control segment of `ControlLayout(size).total_bytes`, made by the coordinator."""

    def __init__(
        self, control: Segment, *, rank: int, size: int, timeout_s: float = 300.0, limit_bytes: int | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = 0
        self._control = control
        self._limit_bytes = limit_bytes
        # Spinning pays only while every rank has a core to itself.
        spin_s = _SPIN_S if size <= len(os.sched_getaffinity(0)) else 0.0
        self._barrier = SharedBarrier(control.memory, 0, rank=rank, size=size, spin_s=spin_s, timeout_s=timeout_s)
        self._layout = ControlLayout(size)
        self._half = 0
        self._copies: dict[int, list[torch.Tensor]] = {}  # data pointer of an allocated tensor -> everybody's copy
        self._segments: list[Segment] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor in shared memory; `SharedMemoryFull` on every rank if there is no room for all the copies."""
        if device.type != "cpu":
            raise ValueError(f"Shared memory holds CPU tensors, not {device.type} tensors.")
        padded = math.ceil(max(numel, 1) / _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS
        bytes_per_rank = padded * dtype.itemsize
        segment = self._create_segment(bytes_per_rank * self.size) if self.rank == 0 else None
        self._barrier.wait()
        notice = self._read_notice()
        if segment is None and not notice.startswith("!"):
            try:
                segment = Segment.attach(notice)
            except FileNotFoundError:
                raise PeerLost("Worker 0 went away while it shared out memory.") from None
        self._barrier.wait()  # everybody has read the notice and is attached
        if segment is None:
            raise SharedMemoryFull(notice[1:])
        segment.close_descriptor()
        self._segments.append(segment)
        copies = [
            torch.frombuffer(segment.memory, dtype=dtype, count=numel, offset=r * bytes_per_rank)
            if numel
            else torch.empty(0, dtype=dtype)
            for r in range(self.size)
        ]
        own = copies[self.rank]
        self._copies[own.data_ptr()] = copies
        return own

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Weighted sum over all ranks, in place."""
        self.bytes_sent += tensor.nbytes
        copies = self._copies.get(tensor.data_ptr())
        if copies is not None and (own := copies[self.rank]).numel() == tensor.numel() and own.dtype == tensor.dtype:
            self._sum_in_place(copies, weight)
        else:
            self._sum_staged(tensor, weight)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` with rank `source`'s, a stage at a time."""
        self.bytes_sent += tensor.nbytes if self.rank == source else 0
        flat = tensor.detach().contiguous().view(-1)
        chunk = STAGE_BYTES // flat.element_size()
        for start in range(0, flat.numel(), chunk):
            part = flat[start : start + chunk]
            half = self._next_half()
            if self.rank == source:
                self._staged(source, half, part.dtype, part.numel()).copy_(part)
            self._barrier.wait()
            if self.rank != source:
                part.copy_(self._staged(source, half, part.dtype, part.numel()))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def gather(self, payload: bytes) -> list[bytes]:
        """Everybody's payload in rank order, as many stages as the longest one needs."""
        self.bytes_sent += len(payload)
        self._write_slot(0.0, len(payload))
        self._barrier.wait()
        lengths = [self._read_slot(r)[1] for r in range(self.size)]
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        memory = self._control.memory
        for start in range(0, max(lengths), STAGE_BYTES):
            half = self._next_half()
            mine = payload[start : start + STAGE_BYTES]
            offset = self._layout.staging(self.rank, half)
            memory[offset : offset + len(mine)] = mine
            self._barrier.wait()
            for r, length in enumerate(lengths):
                offset = self._layout.staging(r, half)
                parts[r].append(memory[offset : offset + max(0, min(STAGE_BYTES, length - start))])
        self._barrier.wait()  # the slots may be written again
        return [b"".join(p) for p in parts]

    def barrier(self) -> None:
        """Wait for every rank."""
        self._barrier.wait()

    def abort(self) -> None:
        """Everybody, on every rank, gets `PeerLost`."""
        self._barrier.abort()

    def close(self) -> None:
        """Forget the mappings; the kernel frees the memory with the last of them."""
        self._copies.clear()
        self._segments.clear()

    def _sum_in_place(self, copies: list[torch.Tensor], weight: float) -> None:
        self._write_slot(weight, 0)
        self._barrier.wait()
        weights = [self._read_slot(r)[0] for r in range(self.size)]
        if not (copies[0].is_floating_point() or copies[0].is_complex()):
            weights = [int(w) for w in weights]  # a float weight would round large integers
        low, high = split(copies[0].numel(), self.size)[self.rank]
        for start in range(low, high, _CHUNK_ELEMENTS):
            stop = min(start + _CHUNK_ELEMENTS, high)
            total = copies[0][start:stop] * weights[0]
            for copy, w in zip(copies[1:], weights[1:], strict=True):
                total.add_(copy[start:stop], alpha=w)
            for copy in copies:
                copy[start:stop] = total
        self._barrier.wait()

    def _sum_staged(self, tensor: torch.Tensor, weight: float) -> None:
        flat = tensor.detach().contiguous().view(-1)
        chunk = STAGE_BYTES // flat.element_size()
        for start in range(0, flat.numel(), chunk):
            part = flat[start : start + chunk]
            half = self._next_half()
            mine = self._staged(self.rank, half, part.dtype, part.numel())
            mine.copy_(part if weight == 1.0 else part * weight)
            self._barrier.wait()
            part.copy_(self._staged(0, half, part.dtype, part.numel()))
            for r in range(1, self.size):
                part.add_(self._staged(r, half, part.dtype, part.numel()))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _create_segment(self, size_bytes: int) -> Segment | None:
        try:
            taken = sum(s.size_bytes for s in self._segments)
            if self._limit_bytes is not None and taken + size_bytes > self._limit_bytes:
                raise OSError(f"{(taken + size_bytes) / 1e6:.1f} MB needed, {self._limit_bytes / 1e6:.1f} MB allowed")
            segment = Segment.create(size_bytes, "syncline-tensors")
        except OSError as error:
            self._write_notice(f"!{error}")
            return None
        self._write_notice(segment.address)
        return segment

    # Rank 0 announces the address of a new segment in the notice, or, after a "!", why there is none.
    def _write_notice(self, text: str) -> None:
        data = text.encode()[:NOTICE_BYTES].ljust(NOTICE_BYTES, b"\0")
        self._control.memory[self._layout.notice : self._layout.stage] = data

    def _read_notice(self) -> str:
        return self._control.memory[self._layout.notice : self._layout.stage].rstrip(b"\0").decode(errors="replace")

    def _write_slot(self, weight: float, length: int) -> None:
        _SLOT.pack_into(self._control.memory, self._layout.slot(self.rank), weight, length)

    def _read_slot(self, rank: int) -> tuple[float, int]:
        weight, length = _SLOT.unpack_from(self._control.memory, self._layout.slot(rank))
        return weight, length

    def _next_half(self) -> int:
        self._half ^= 1
        return self._half

    def _staged(self, rank: int, half: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        offset = self._layout.staging(rank, half)
        return torch.frombuffer(self._control.memory, dtype=dtype, count=count, offset=offset)
