"""Tensors in memory that all ranks of a host map.

Here: allocating them, and finding every rank's copy of one. Not here: what is done with the copies
(`shared_memory.py`, `overlapped_sum.py`), and memory segments as such (`segment.py`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from syncline.comms.barrier import SharedBarrier
from syncline.comms.segment import Segment
from syncline.comms.staging import Staging
from syncline.compute.partition import split
from syncline.errors import PeerFailed, SynclineError

CHUNK_ELEMENTS = 256 * 1024
"""Large enough that Python's overhead is small, small enough for a core's cache."""
_ALIGN_ELEMENTS = 64


class SharedMemoryFull(SynclineError):
    """There is not enough memory to share; the caller may fall back to another collective."""


class SharedTensors:
    """The tensors of one collective. `parent` has those of the collective that it was split from, of `members`."""

    def __init__(
        self,
        staging: Staging,
        barrier: SharedBarrier,
        *,
        limit_bytes: int | None,
        parent: SharedTensors | None,
        members: Sequence[int],
    ) -> None:
        self._staging, self._barrier = staging, barrier
        self._rank, self._size = barrier.rank, barrier.size
        self._limit_bytes, self._parent, self._members = limit_bytes, parent, members
        self._segments: list[Segment] = []
        self._copies: dict[int, list[torch.Tensor]] = {}  # data pointer of an allocated tensor -> every rank's copy
        self._slices: dict[int, list[list[torch.Tensor]]] = {}  # data pointer -> what this rank sums of it

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """This rank's copy of a new tensor that every rank has a copy of."""
        bytes_per_rank = _padded(numel) * dtype.itemsize
        memory = self.map_segment(bytes_per_rank * self._size)
        copies = [_tensor_in(memory, r * bytes_per_rank, numel, dtype) for r in range(self._size)]
        own = copies[self._rank]
        self._copies[own.data_ptr()] = copies
        return own

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """One tensor for all ranks."""
        return _tensor_in(self.map_segment(_padded(numel) * dtype.itemsize), 0, numel, dtype)

    def copies_of(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's copy, if `tensor` is one that this collective or its parent has allocated."""
        copies = self._copies.get(tensor.data_ptr())
        if copies is not None:
            own = copies[self._rank]
            return copies if own.numel() == tensor.numel() and own.dtype == tensor.dtype else None
        above = self._parent.copies_of(tensor) if self._parent is not None else None
        return [above[r] for r in self._members] if above is not None else None

    def own_slices(self, copies: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The part of the tensor that this rank sums, in chunks: for each, the slices of every rank's copy.

        Cached for each tensor: for small ones, taking views costs as much as the sum.
        """
        key = copies[self._rank].data_ptr()
        slices = self._slices.get(key)
        if slices is None:
            low, high = split(copies[0].numel(), self._size)[self._rank]
            bounds = [(start, min(start + CHUNK_ELEMENTS, high)) for start in range(low, high, CHUNK_ELEMENTS)]
            slices = self._slices[key] = [[copy[start:stop] for copy in copies] for start, stop in bounds]
        return slices

    def map_segment(self, size_bytes: int) -> mmap.mmap:
        """Zeroed memory that all ranks map, created by rank 0."""
        segment = self._create_segment(size_bytes) if self._rank == 0 else None
        try:
            self._barrier.wait()
            notice = self._staging.read_notice()
            if segment is None and not notice.startswith("!"):
                segment = attach_segment(notice, self._barrier.names[0])
            self._barrier.wait()  # all ranks have read the notice and are attached
        finally:
            if segment is not None:
                segment.close_descriptor()
        if segment is None:
            raise SharedMemoryFull(notice[1:])
        self._segments.append(segment)
        return segment.memory

    def clear(self) -> None:
        """Drop the mappings; the kernel frees the memory with the last of them."""
        self._copies.clear()
        self._segments.clear()
        self._slices.clear()
        self._parent = None

    def _create_segment(self, size_bytes: int) -> Segment | None:
        try:
            taken = sum(s.size_bytes for s in self._segments)
            if self._limit_bytes is not None and taken + size_bytes > self._limit_bytes:
                raise OSError(f"{(taken + size_bytes) / 1e6:.1f} MB needed, {self._limit_bytes / 1e6:.1f} MB allowed")
            segment = Segment.create(size_bytes, "syncline-tensors")
        except OSError as error:
            self._staging.write_notice(f"!{error}")
            return None
        self._staging.write_notice(segment.address)
        return segment


def attach_segment(address: str, owner: int) -> Segment:
    """The segment that the rank `owner` has created."""
    try:
        return Segment.attach(address)
    except OSError as error:
        raise PeerFailed(f"Rank {owner} failed while it shared memory ({error}).", rank=owner) from None


def _padded(numel: int) -> int:
    return math.ceil(max(numel, 1) / _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS


def _tensor_in(memory: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)  # torch refuses an empty part of a buffer
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
