"""All-reduce of a tensor, part by part while later parts are still being computed, as DDP does with buckets.

Here: `OverlappedSum`, for tensors in memory that all ranks map, and `add_up`, the sum. A rank marks each part when it
is complete, and continues computing. Each time, it also sums its own share of every part that all ranks have completed
by then. The rest is summed at the end. So no rank waits in between, no thread is needed, and the summed values are
still in a cache. Not here: memory and barriers (`shared_memory.py`), and the choice of parts
(`strategies/overlap.py`).

Each rank has a row that the others only read: its weight, and for each part the round in which it was last completed.
Other x86 cores see one core's stores in program order: a rank that sees the mark of a part sees the part as well.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch

from syncline.comms.barrier import LINE_BYTES
from syncline.compute.kernels.add_up import add_copies
from syncline.compute.partition import split

_WEIGHT_BYTES = 8


class OverlappedSum:
    """Sums one tensor, once in each step; `parts` are ranges of it, in the order in which they usually complete.

    The parts are disjoint and cover the tensor. `barrier` waits for all ranks; `count` is called for each sum.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        copies: Sequence[torch.Tensor],
        parts: Sequence[tuple[int, int]],
        *,
        rank: int,
        barrier: Callable[[], None],
        count: Callable[[], None] = lambda: None,
    ) -> None:
        size = len(copies)
        self._rank, self._barrier, self._count = rank, barrier, count
        self._pieces = [_own_pieces(copies, low, high, rank) for low, high in parts]
        self._weights = [memoryview(memory)[row : row + _WEIGHT_BYTES].cast("d") for row in _rows(size, len(parts))]
        self._rounds = [
            memoryview(memory)[row + _WEIGHT_BYTES : row + _WEIGHT_BYTES + 4 * len(parts)].cast("I")
            for row in _rows(size, len(parts))
        ]
        self._others = [r for r in range(size) if r != rank]
        self._round = 0
        self._next = len(parts)  # the first part that is not summed yet
        self.added_ahead = 0
        """How many parts this rank has summed before `finish`."""

    @staticmethod
    def bytes_needed(size: int, parts: int) -> int:
        """Memory for the rows of all ranks."""
        return size * _row_bytes(parts)

    def begin(self, weight: float) -> None:
        """From now on parts are completed; `weight` is that of this rank in this sum."""
        self._round = (self._round + 1) % 2**32
        self._next = 0
        self._weights[self._rank][0] = weight

    def complete(self, part: int) -> None:
        """This rank writes no more into this part in this step."""
        self._rounds[self._rank][part] = self._round
        while self._next < len(self._pieces) and self._is_complete_everywhere(self._next):
            self._add_up(self._next)
            self._next += 1
            self.added_ahead += 1

    def finish(self) -> None:
        """Wait for all ranks, and sum the remaining parts, which now count as complete."""
        self._count()
        self._barrier()
        for part in range(self._next, len(self._pieces)):
            self._add_up(part)
        self._next = len(self._pieces)
        self._barrier()

    def _is_complete_everywhere(self, part: int) -> bool:
        if self._rounds[self._rank][part] != self._round:
            return False
        return all(self._rounds[other][part] == self._round for other in self._others)

    def _add_up(self, part: int) -> None:
        add_up(self._pieces[part], [row[0] for row in self._weights], self._rank)


def add_up(copies: Sequence[torch.Tensor], weights: Sequence[float], rank: int) -> None:
    """Replace all copies, one from each rank, by their weighted sum, with the bits of a sum in rank order.

    Multiplying by powers of two is exact: then compiled code gives these bits in one pass. With two copies the order
    does not matter either, and torch starts with the rank's own, which lies in its core's cache.
    """
    is_exact = all(math.frexp(weight)[0] == 0.5 for weight in weights)
    if is_exact and add_copies(copies, weights):
        return
    start = rank if is_exact and len(copies) == 2 else 0
    total = copies[start]
    if weights[start] != 1:
        total.mul_(weights[start])
    for r, copy in enumerate(copies):
        if r != start:
            total.add_(copy, alpha=weights[r])
    for r, copy in enumerate(copies):
        if r != start:
            copy.copy_(total)


def _own_pieces(copies: Sequence[torch.Tensor], low: int, high: int, rank: int) -> list[torch.Tensor]:
    """This rank's share of a part, in every rank's copy."""
    start, stop = split(high - low, len(copies))[rank]
    return [copy[low + start : low + stop] for copy in copies]


def _row_bytes(parts: int) -> int:
    """Whole cache lines, so that writes of different ranks do not slow each other down."""
    return -(-(_WEIGHT_BYTES + 4 * parts) // LINE_BYTES) * LINE_BYTES


def _rows(size: int, parts: int) -> list[int]:
    return [r * _row_bytes(parts) for r in range(size)]
