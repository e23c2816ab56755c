"""Collectives between processes of one host, through memory that all of them map.

Here: `SharedMemory`, a `Collective`. Not here: where the memory comes from (`segment.py`), how ranks wait for each
other (`barrier.py`).

A tensor from `allocate` lies in shared memory on every rank. `sum_` splits it into one piece per rank; each rank adds
up its own piece from everybody's copy and writes the result back into every copy. Nobody else touches that piece
between the two barriers, so nothing is copied in or out and all ranks end up with the same bits.

`mix_` reads the copies of those a rank takes from, and writes the result back only when everybody has read.

Tensors from elsewhere pass through a small staging area; there, two halves used in turn save the second barrier: a
rank can only write a half again after everybody has arrived at the call in between, and so has finished reading it.

A collective that was split from another has a control segment of its own, made by its first rank. Its tensors may come
from the one above: they lie in shared memory all the same. Those on one of several hosts, too, can have one of these,
split from what all hosts have in common (`process_group.py`).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from syncline.algorithms.partition import split
from syncline.comms.barrier import SharedBarrier
from syncline.comms.collective import Collective, Solo, check_mixing, mixed, takers
from syncline.comms.layout import NOTICE_BYTES, STAGE_BYTES, ControlLayout
from syncline.comms.segment import Segment
from syncline.comms.sum_ahead import SumAhead, add_up
from syncline.errors import PeerLost, SynclineError
from syncline.kernels.build import library

__all__ = ["SharedMemory", "SharedMemoryFull"]

_CHUNK_ELEMENTS = 256 * 1024  # large enough that Python costs little, small enough for a core's cache
_SPIN_S = 100e-6
_ALIGN_ELEMENTS = 64
_LOOK_UP_S = 0.2  # how often a rank that waits in a split collective looks whether one above was aborted

_SLOT = struct.Struct("<dQ")  # a rank's weight; the length of what it staged


class SharedMemoryFull(SynclineError):
    """There is not enough memory to share; the caller may fall back to another collective."""


class SharedMemory:
    """A `Collective` over a zeroed control segment of `ControlLayout(size).total_bytes`, made by the coordinator.

    `split` also says what the new one is split from (`parent`) and which ranks of it are members. Who splits one from a
    collective of another kind says instead when that is over (`is_over`).
    """

    def __init__(
        self,
        control: Segment,
        *,
        rank: int,
        size: int,
        timeout_s: float = 300.0,
        limit_bytes: int | None = None,
        parent: SharedMemory | None = None,
        members: Sequence[int] = (),
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = 0
        self._control = control
        self._timeout_s, self._limit_bytes = timeout_s, limit_bytes
        self._parent, self._members = parent, members
        self._barrier: SharedBarrier
        # Spinning pays only while every rank has a core to itself.
        self._spin_s: float = parent._spin_s if parent else _SPIN_S if size <= len(os.sched_getaffinity(0)) else 0.0
        # By which messages name the ranks.
        self._workers: list[int] = [parent._workers[r] for r in members] if parent else list(members or range(size))
        is_over = parent._is_over if parent else is_over
        if is_over is None:
            self._barrier = SharedBarrier(
                control.memory, 0, rank=rank, size=size, spin_s=self._spin_s, timeout_s=timeout_s
            )
        else:
            self._barrier = _ChildBarrier(
                control.memory, is_over, self._workers, rank, spin_s=self._spin_s, timeout_s=timeout_s
            )
        self._layout = ControlLayout(size)
        self._half = 0
        self._copies: dict[int, list[torch.Tensor]] = {}  # data pointer of an allocated tensor -> everybody's copy
        self._pieces: dict[int, list[list[torch.Tensor]]] = {}  # data pointer -> what this rank adds up of it
        self._results: dict[int, torch.Tensor] = {}  # data pointer of an allocated tensor -> room for its next value
        self._segments: list[Segment] = []
        self._children: list[Collective] = []

    @property
    def waited_s(self) -> float:
        """Here and in what was split from here."""
        return self._barrier.waited_s + sum(child.waited_s for child in self._children)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor in shared memory; `SharedMemoryFull` on every rank if there is no room for all the copies."""
        if device.type != "cpu":
            raise ValueError(f"Shared memory holds CPU tensors, not {device.type} tensors.")
        library("sums")  # compiled now if need be, and not in the first exchange
        bytes_per_rank = _padded(numel) * dtype.itemsize
        memory = self._map_new_segment(bytes_per_rank * self.size)
        copies = [_tensor_in(memory, r * bytes_per_rank, numel, dtype) for r in range(self.size)]
        own = copies[self.rank]
        self._copies[own.data_ptr()] = copies
        return own

    def share(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same memory on every rank; `SharedMemoryFull` on every rank if there is no room for it."""
        return _tensor_in(self._map_new_segment(_padded(numel) * dtype.itemsize), 0, numel, dtype)

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Weighted sum over all ranks, in place."""
        self.bytes_sent += tensor.nbytes
        copies = self._copies_of(tensor)
        if copies is not None:
            self._sum_in_place(copies, weight)
        else:
            self._sum_staged(tensor, weight)

    def sum_ahead(self, tensor: torch.Tensor, parts: Sequence[tuple[int, int]]) -> SumAhead | None:
        """A way to sum `tensor` part by part while it is being computed; None if it is not one from `allocate`.

        All ranks call this together. The bits are those of `sum_`.
        """
        copies = self._copies_of(tensor)
        if copies is None or not tensor.is_floating_point():
            return None

        def count() -> None:
            self.bytes_sent += tensor.nbytes

        memory = self._map_new_segment(SumAhead.bytes_needed(self.size, len(parts)))
        return SumAhead(memory, copies, parts, rank=self.rank, barrier=self._barrier.wait, count=count)

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        """Take from the others' copies, or from what they staged."""
        check_mixing(tensor, mixing, self.size)
        takers_count = len(takers(mixing, self.rank))
        self.bytes_sent += tensor.nbytes * takers_count
        copies = self._copies_of(tensor)
        if copies is not None:
            self._mix_in_place(copies, mixing[self.rank])
        else:
            self._mix_staged(tensor, mixing[self.rank], is_taken=takers_count > 0)

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
        return self._gather(payload)

    def barrier(self) -> None:
        """Wait for every rank."""
        self._barrier.wait()

    def hosts(self) -> list[int]:
        """One: there is no memory in common but on one host."""
        return [0] * self.size

    def split(self, color: int) -> Collective:
        """A control segment of its own for each color, made by its first rank; none for a rank alone."""
        colors = [int(text) for text in self._gather(b"%d" % color)]
        members = [r for r, theirs in enumerate(colors) if theirs == color]
        child = self._split_with(members, leaders={colors.index(c) for c in colors if colors.count(c) > 1})
        self._children.append(child)
        if _is_aborted(self._barrier):  # perhaps just now, by a thread that did not find the child yet
            child.abort()
        return child

    def abort(self) -> None:
        """Everybody, on every rank, gets `PeerLost`, here and in what was split from here."""
        self._barrier.abort()
        for child in self._children:  # the other ranks' children look up here from time to time
            child.abort()

    def close(self) -> None:
        """Forget the mappings; the kernel frees the memory with the last of them."""
        for child in self._children:
            child.close()
        self._children.clear()
        self._copies.clear()
        self._segments.clear()
        self._results.clear()
        self._pieces.clear()
        self._parent = None

    def _is_over(self) -> bool:
        if isinstance(self._barrier, _ChildBarrier):
            self._barrier.look_up()
        return _is_aborted(self._barrier)

    def _gather(self, payload: bytes) -> list[bytes]:
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

    def _split_with(self, members: list[int], leaders: set[int]) -> Collective:
        control: Segment | None = None
        told = ""
        if self.rank in leaders:
            try:
                control = Segment.create(ControlLayout(len(members)).total_bytes, "syncline-split")
                told = control.address
            except OSError as error:
                told = f"!{error}"
        try:
            addresses = [text.decode() for text in self._gather(told.encode())]
            refused = next((address[1:] for address in addresses if address.startswith("!")), None)
            if refused is None and control is None and len(members) > 1:
                control = self._attach(addresses[members[0]], members[0])
            self._barrier.wait()  # everybody is attached
        finally:
            if control is not None:
                control.close_descriptor()
        if refused is not None:
            raise SharedMemoryFull(refused)
        if control is None:
            return Solo()
        return SharedMemory(
            control,
            rank=members.index(self.rank),
            size=len(members),
            timeout_s=self._timeout_s,
            limit_bytes=self._limit_bytes,
            parent=self,
            members=members,
        )

    def _attach(self, address: str, owner: int) -> Segment:
        try:
            return Segment.attach(address)
        except OSError as error:
            raise PeerLost(f"Worker {self._workers[owner]} went away while it shared out memory ({error}).") from None

    def _copies_of(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's copy, if `tensor` is one that this collective or one above has allocated."""
        copies = self._copies.get(tensor.data_ptr())
        if copies is not None:
            own = copies[self.rank]
            return copies if own.numel() == tensor.numel() and own.dtype == tensor.dtype else None
        above = self._parent._copies_of(tensor) if self._parent is not None else None
        return [above[r] for r in self._members] if above is not None else None

    def _sum_in_place(self, copies: list[torch.Tensor], weight: float) -> None:
        self._write_slot(weight, 0)
        self._barrier.wait()
        weights = [self._read_slot(r)[0] for r in range(self.size)]
        if not (copies[0].is_floating_point() or copies[0].is_complex()):
            weights = [int(w) for w in weights]  # a float weight would round large integers
        for pieces in self._own_pieces(copies):
            add_up(pieces, weights, self.rank)
        self._barrier.wait()

    def _own_pieces(self, copies: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The part of the tensor that this rank adds up, in pieces, each as it is in everybody's copy.

        Made once for each tensor: for small ones, taking views costs as much as adding up.
        """
        key = copies[self.rank].data_ptr()
        pieces = self._pieces.get(key)
        if pieces is None:
            low, high = split(copies[0].numel(), self.size)[self.rank]
            bounds = [(start, min(start + _CHUNK_ELEMENTS, high)) for start in range(low, high, _CHUNK_ELEMENTS)]
            pieces = self._pieces[key] = [[copy[start:stop] for copy in copies] for start, stop in bounds]
        return pieces

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

    def _mix_in_place(self, copies: list[torch.Tensor], weights: Mapping[int, float]) -> None:
        own = copies[self.rank]
        result = own
        self._barrier.wait()  # everybody's value is there
        if dict(weights) != {self.rank: 1.0}:
            result = self._results.setdefault(own.data_ptr(), torch.empty(0, dtype=own.dtype)).resize_(own.shape)
            for start in range(0, own.numel(), _CHUNK_ELEMENTS):
                part = slice(start, start + _CHUNK_ELEMENTS)
                result[part] = mixed({r: copies[r][part] for r in weights}, weights)
        self._barrier.wait()  # nobody reads any more
        if result is not own:
            own.copy_(result)

    def _mix_staged(self, tensor: torch.Tensor, weights: Mapping[int, float], *, is_taken: bool) -> None:
        flat = tensor.detach().contiguous().view(-1)
        chunk = STAGE_BYTES // flat.element_size()
        for start in range(0, flat.numel(), chunk):
            part = flat[start : start + chunk]
            half = self._next_half()
            if is_taken:
                self._staged(self.rank, half, part.dtype, part.numel()).copy_(part)
            self._barrier.wait()
            values = {r: self._staged(r, half, part.dtype, part.numel()) for r in weights if r != self.rank}
            part.copy_(mixed({self.rank: part, **values}, weights))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _map_new_segment(self, size_bytes: int) -> mmap.mmap:
        """Zeroed memory that all ranks map, made by rank 0."""
        segment = self._create_segment(size_bytes) if self.rank == 0 else None
        try:
            self._barrier.wait()
            notice = self._read_notice()
            if segment is None and not notice.startswith("!"):
                segment = self._attach(notice, 0)
            self._barrier.wait()  # everybody has read the notice and is attached
        finally:
            if segment is not None:
                segment.close_descriptor()
        if segment is None:
            raise SharedMemoryFull(notice[1:])
        self._segments.append(segment)
        return segment.memory

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


class _ChildBarrier(SharedBarrier):
    """A barrier of some of the ranks, at which waits also end when what is above it is aborted, by whomever.

    Whoever aborts above need not know this one, so those who wait here look up from time to time.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        is_over: Callable[[], bool],
        workers: Sequence[int],
        rank: int,
        *,
        spin_s: float,
        timeout_s: float,
    ) -> None:
        super().__init__(memory, 0, rank=rank, size=len(workers), spin_s=spin_s, timeout_s=_LOOK_UP_S)
        self._is_over, self._workers, self._limit_s = is_over, workers, timeout_s

    def wait(self) -> None:
        """As ever, unless what is above is aborted."""
        self.look_up()
        super().wait()

    def _wait_for(self, other: int, index: int, count: int) -> None:
        until = time.monotonic() + self._limit_s
        while True:
            # The other one may come and abort between two looks; it is missing only if it is after an abort.
            was_aborted = _is_aborted(self)
            try:
                return super()._wait_for(other, index, count)
            except PeerLost:
                if was_aborted:
                    raise
            self.look_up()
            if time.monotonic() > until and not _is_aborted(self):
                raise PeerLost(
                    f"Worker {self._workers[other]} did not come to the exchange within {self._limit_s:g} s."
                )

    def look_up(self) -> None:
        """Abort if what is above is."""
        if self._is_over():
            self.abort()


def _is_aborted(barrier: SharedBarrier) -> bool:
    return bool(barrier._words[barrier._aborted_index])


def _padded(numel: int) -> int:
    return math.ceil(max(numel, 1) / _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS


def _tensor_in(memory: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)  # torch makes none of an empty part of a buffer
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
