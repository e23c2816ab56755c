"""Collectives between processes of one host, through memory that all of them map.

Here: `SharedMemory`, a `Collective`. Not here: the memory (`segment.py`, `shared_tensors.py`), small messages between
the ranks (`staging.py`), and how ranks wait for each other (`barrier.py`).

A tensor from `allocate` lies in shared memory. `all_reduce_` splits it into one part per rank; each rank sums its part
over all copies and writes the result into every copy. No other rank touches that part between the two barriers, so
nothing is copied in or out, and all ranks end up with the same bits.

`mix_` reads the copies of the ranks that this rank takes from, and writes the result when all ranks have read.

Other tensors pass through a small staging area, a part at a time.

A collective split from another has a control segment of its own, created by its first rank. Its tensors may come from
the parent: they lie in shared memory, too. The ranks on one of several hosts can also have one, split from a process
group of all hosts (`process_group.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from syncline.comms.barrier import LINE_BYTES, ChildBarrier, SharedBarrier
from syncline.comms.channel import TensorChannel
from syncline.comms.collective import Collective, Solo, check_mixing, mixed, takers
from syncline.comms.overlapped_sum import OverlappedSum, add_up
from syncline.comms.segment import STAGE_BYTES, ControlLayout, Segment
from syncline.comms.shared_tensors import CHUNK_ELEMENTS, SharedMemoryFull, SharedTensors, attach_segment
from syncline.comms.staging import SUMMING, Staging, out_of_step
from syncline.compute.kernels.build import library

_SPIN_S = 100e-6


class SharedMemory:
    """A `Collective` over a zeroed control segment of `ControlLayout(size).total_bytes`, created by the coordinator.

    One that is split from another of this kind has a `parent`, and `members`, its ranks in the parent. One that is
    split from a collective of another kind has `is_over` instead, which says when that one was aborted.
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
        self._timeout_s, self._limit_bytes = timeout_s, limit_bytes
        # Spinning pays only while every rank has a core to itself.
        self._spin_s: float = parent._spin_s if parent else _SPIN_S if size <= len(os.sched_getaffinity(0)) else 0.0
        # Errors name the ranks of the topmost collective.
        names = [parent._barrier.names[r] for r in members] if parent else list(members or range(size))
        is_over = parent._barrier.is_over if parent else is_over
        self._barrier: SharedBarrier
        if is_over is None:
            self._barrier = SharedBarrier(
                control.memory, 0, rank=rank, size=size, spin_s=self._spin_s, timeout_s=timeout_s
            )
        else:
            self._barrier = ChildBarrier(control.memory, is_over, names, rank, spin_s=self._spin_s, timeout_s=timeout_s)
        self._staging = Staging(control.memory, self._barrier)
        self._tensors: SharedTensors = SharedTensors(
            self._staging,
            self._barrier,
            limit_bytes=limit_bytes,
            parent=parent._tensors if parent else None,
            members=members,
        )
        self._results: dict[int, torch.Tensor] = {}  # data pointer of an allocated tensor -> memory for its next value
        self._children: list[Collective] = []

    @property
    def waited_s(self) -> float:
        """Includes the collectives that were split from this one."""
        return self._barrier.waited_s + sum(child.waited_s for child in self._children)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor in shared memory; `SharedMemoryFull` on every rank if there is not enough for all copies."""
        if device.type != "cpu":
            raise ValueError(f"Shared memory holds CPU tensors, not {device.type} tensors.")
        library("sums")  # compiled at allocation if need be, not in the first exchange
        return self._tensors.allocate(numel, dtype)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same memory on every rank; `SharedMemoryFull` on every rank if there is not enough."""
        return self._tensors.allocate_shared(numel, dtype)

    def all_reduce_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        self.bytes_sent += tensor.nbytes
        copies = self._tensors.copies_of(tensor)
        if copies is not None:
            self._sum_in_place(copies, weight)
        else:
            self._sum_staged(tensor, weight)

    def overlapped_sum(self, tensor: torch.Tensor, parts: Sequence[tuple[int, int]]) -> OverlappedSum | None:
        """An all-reduce of `tensor`, part by part while it is being computed; None if it is not from `allocate`.

        All ranks call this together. The bits are those of `all_reduce_`.
        """
        copies = self._tensors.copies_of(tensor)
        if copies is None or not tensor.is_floating_point():
            return None

        def count() -> None:
            self.bytes_sent += tensor.nbytes

        memory = self._tensors.map_segment(OverlappedSum.bytes_needed(self.size, len(parts)))
        return OverlappedSum(memory, copies, parts, rank=self.rank, barrier=self._barrier.wait, count=count)

    def open_channels(
        self, routes: Sequence[tuple[int, int]], *, slots: int, slot_bytes: int
    ) -> dict[tuple[int, int], TensorChannel]:
        """This rank's channels among those from one rank to another; all ranks call this together."""
        slot_bytes = -(-slot_bytes // LINE_BYTES) * LINE_BYTES
        size = TensorChannel.bytes_needed(slots, slot_bytes)
        memory = memoryview(self._tensors.map_segment(max(1, len(routes)) * size))
        return {
            (source, target): TensorChannel(
                memory[number * size : (number + 1) * size],
                is_sender=source == self.rank,
                slots=slots,
                slot_bytes=slot_bytes,
                peer=self._barrier.names[target if source == self.rank else source],
                is_over=self._barrier.is_over,
                spin_s=self._spin_s,
                timeout_s=self._timeout_s,
            )
            for number, (source, target) in enumerate(routes)
            if self.rank in (source, target)
        }

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        check_mixing(tensor, mixing, self.size)
        takers_count = len(takers(mixing, self.rank))
        self.bytes_sent += tensor.nbytes * takers_count
        copies = self._tensors.copies_of(tensor)
        if copies is not None:
            self._mix_in_place(copies, mixing[self.rank])
        else:
            self._mix_staged(tensor, mixing[self.rank], is_taken=takers_count > 0)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        self.bytes_sent += tensor.nbytes if self.rank == source else 0

        def exchange(part: torch.Tensor, area: int) -> None:
            staged = self._staging.tensor(source, area, part.dtype, part.numel())
            if self.rank == source:
                staged.copy_(part)
            self._barrier.wait()
            if self.rank != source:
                part.copy_(staged)

        _in_parts(tensor, self._staging, exchange)

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.bytes_sent += len(payload)
        return self._staging.all_gather(payload)

    def barrier(self) -> None:
        self._barrier.wait()

    def hosts(self) -> list[int]:
        """One: only processes of one host share memory."""
        return [0] * self.size

    def split(self, color: int) -> Collective:
        """A control segment for each color, created by its first rank; `Solo` for a rank alone."""
        colors = [int(text) for text in self._staging.all_gather(b"%d" % color)]
        members = [r for r, theirs in enumerate(colors) if theirs == color]
        child = self._split_with(members, leaders={colors.index(c) for c in colors if colors.count(c) > 1})
        self._children.append(child)
        if self._barrier.is_aborted:  # perhaps just now, by a thread that did not see the child yet
            child.abort()
        return child

    def abort(self) -> None:
        """Every rank gets `PeerFailed`, here and in the collectives split from this one."""
        self._barrier.abort()
        for child in self._children:  # the other ranks' children check this barrier from time to time
            child.abort()

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._children.clear()
        self._results.clear()
        self._tensors.clear()

    def _split_with(self, members: list[int], leaders: set[int]) -> Collective:
        control: Segment | None = None
        announced = ""
        if self.rank in leaders:
            try:
                control = Segment.create(ControlLayout(len(members)).total_bytes, "syncline-split")
                announced = control.address
            except OSError as error:
                announced = f"!{error}"
        try:
            addresses = [text.decode() for text in self._staging.all_gather(announced.encode())]
            refused = next((address[1:] for address in addresses if address.startswith("!")), None)
            if refused is None and control is None and len(members) > 1:
                control = attach_segment(addresses[members[0]], self._barrier.names[members[0]])
            self._barrier.wait()  # all ranks are attached
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

    def _sum_in_place(self, copies: list[torch.Tensor], weight: float) -> None:
        staging = self._staging
        staging.write_slot(weight, SUMMING)
        self._barrier.wait()
        slots = [staging.read_slot(r) for r in range(self.size)]
        others = [r for r, (_, length) in enumerate(slots) if length != SUMMING]
        if others:
            raise out_of_step(others[0], self.rank)
        weights = [weight for weight, _ in slots]
        if not (copies[0].is_floating_point() or copies[0].is_complex()):
            weights = [int(w) for w in weights]  # a float weight would round large integers
        for slices in self._tensors.own_slices(copies):
            add_up(slices, weights, self.rank)
        self._barrier.wait()

    def _sum_staged(self, tensor: torch.Tensor, weight: float) -> None:
        # Not by `_in_parts`: small sums are frequent, and this order of calls is 5 us faster.
        flat = tensor.detach().contiguous().view(-1)
        count = STAGE_BYTES // flat.element_size()
        staging = self._staging
        for start in range(0, flat.numel(), count):
            part = flat[start : start + count]
            area = staging.next_area()
            staging.tensor(self.rank, area, part.dtype, part.numel()).copy_(part if weight == 1.0 else part * weight)
            self._barrier.wait()
            part.copy_(staging.tensor(0, area, part.dtype, part.numel()))
            for r in range(1, self.size):
                part.add_(staging.tensor(r, area, part.dtype, part.numel()))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _mix_in_place(self, copies: list[torch.Tensor], weights: Mapping[int, float]) -> None:
        own = copies[self.rank]
        result = own
        self._barrier.wait()  # every rank's value is there
        if dict(weights) != {self.rank: 1.0}:
            result = self._results.setdefault(own.data_ptr(), torch.empty(0, dtype=own.dtype)).resize_(own.shape)
            for start in range(0, own.numel(), CHUNK_ELEMENTS):
                part = slice(start, start + CHUNK_ELEMENTS)
                result[part] = mixed({r: copies[r][part] for r in weights}, weights)
        self._barrier.wait()  # all ranks have read
        if result is not own:
            own.copy_(result)

    def _mix_staged(self, tensor: torch.Tensor, weights: Mapping[int, float], *, is_taken: bool) -> None:
        def exchange(part: torch.Tensor, area: int) -> None:
            if is_taken:
                self._staging.tensor(self.rank, area, part.dtype, part.numel()).copy_(part)
            self._barrier.wait()
            others = [r for r in weights if r != self.rank]
            values = {r: self._staging.tensor(r, area, part.dtype, part.numel()) for r in others}
            part.copy_(mixed({self.rank: part, **values}, weights))

        _in_parts(tensor, self._staging, exchange)


def _in_parts(tensor: torch.Tensor, staging: Staging, exchange: Callable[[torch.Tensor, int], None]) -> None:
    """Exchange a tensor from elsewhere through the staging areas, and overwrite it with the result."""
    flat = tensor.detach().contiguous().view(-1)
    count = STAGE_BYTES // flat.element_size()
    for start in range(0, flat.numel(), count):
        exchange(flat[start : start + count], staging.next_area())
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
