"""Which posts each rank of a host has made and read: counters in memory that all of them map.

Here: `PostCounters`: marking a post as made or read, and waiting until other ranks have done so. Unlike at a barrier
(`barrier.py`), a rank that makes a post does not wait. Not here: what is posted (`posts.py`).

Each rank owns one cache line with three 32-bit words that the others only read: how many posts it has made, how many
it has read, and whether it has left. After it come short descriptions of its latest posts, so that ranks which do not
do the same thing notice. Other x86 cores see one core's stores in program order: a rank that sees a count sees what
was written before it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
from collections.abc import Sequence

from syncline.comms.barrier import LINE_BYTES
from syncline.comms.futex import Timespec, address_of, sleep_on, wake

DESCRIPTIONS = 16
"""How many of a rank's posts may be unread at a time."""

_MADE, _READ, _LEFT = 0, 1, 2
_DESCRIPTION = struct.Struct("<QQ")  # what the post is for; its size in bytes
_ROW_BYTES = LINE_BYTES + DESCRIPTIONS * _DESCRIPTION.size
_MASK = 2**32 - 1
_SLICE_S = 0.2  # the longest sleep in one go: how late the end of another process is noticed


class PostCounters:
    """One rank's access to the counters in `memory`; `pids` are the processes of all ranks.

    Errors are plain RuntimeErrors with gloo's words, which libraries on top of torch.distributed know.
    """

    def __init__(self, memory: mmap.mmap, rank: int, pids: Sequence[int], *, spin_s: float, timeout_s: float) -> None:
        self._memory: mmap.mmap | bytearray = memory
        self._rank, self._spin_s, self._timeout_s = rank, spin_s, timeout_s
        region = memoryview(memory)[: self.bytes_needed(len(pids))]
        self._words = region.cast("I")
        self._first = address_of(region)
        self._others = [r for r in range(len(pids)) if r != rank]
        self._slice = Timespec.of(_SLICE_S)
        self._processes = {r: os.pidfd_open(pids[r]) for r in self._others}

    @staticmethod
    def bytes_needed(size: int) -> int:
        return size * _ROW_BYTES

    def mark_made(self, number: int, what: int, size_bytes: int) -> None:
        """This rank has made post `number`."""
        _DESCRIPTION.pack_into(self._memory, _description(self._rank, number), what, size_bytes)
        self._store(_MADE, number)

    def mark_read(self, number: int) -> None:
        """This rank has read the posts of all ranks up to `number`."""
        self._store(_READ, number)

    def leave(self) -> None:
        """This rank makes and reads no more posts."""
        self._words[_word(self._rank, _LEFT)] = 1
        self._wake(_MADE)
        self._wake(_READ)
        for descriptor in self._processes.values():
            os.close(descriptor)
        self._processes.clear()
        self._memory = bytearray(self._memory)  # lets go of the shared memory
        self._words = memoryview(self._memory)[: self._words.nbytes].cast("I")

    def have_made(self, number: int) -> bool:
        """Whether all ranks have made post `number`."""
        return all(_reached(self._words[_word(r, _MADE)], number) for r in self._others)

    def await_made(self, number: int) -> None:
        """Wait until all ranks have made post `number`."""
        for r in self._others:
            if not _reached(self._words[_word(r, _MADE)], number):
                self._wait(r, _MADE, number)

    def await_read(self, number: int) -> None:
        """Wait until the other ranks have read the posts up to `number`, or left."""
        for r in self._others:
            if not _reached(self._words[_word(r, _READ)], number):
                self._wait(r, _READ, number)

    def check_others(self) -> None:
        """RuntimeError if another rank has left, or its process has ended."""
        for r in self._others:
            if self._words[_word(r, _LEFT)]:
                raise _left(r)
            self._check(r, 0.0)

    def description(self, rank: int, number: int) -> tuple[int, int]:
        """What post `number` of a rank is for, and its size in bytes."""
        what, size_bytes = _DESCRIPTION.unpack_from(self._memory, _description(rank, number))
        return what, size_bytes

    def _store(self, kind: int, number: int) -> None:
        self._words[_word(self._rank, kind)] = number & _MASK
        self._wake(kind)

    def _wake(self, kind: int) -> None:
        wake(self._address(self._rank, kind))

    def _address(self, rank: int, kind: int) -> int:
        return self._first + 4 * _word(rank, kind)

    def _wait(self, rank: int, kind: int, number: int) -> None:
        words, index = self._words, _word(rank, kind)
        start = time.monotonic()
        while True:
            # Read in this order: what a rank did before it left counts.
            has_left = bool(words[_word(rank, _LEFT)])
            seen = words[index]
            if _reached(seen, number):
                return
            if has_left:
                if kind == _READ:
                    return
                raise _left(rank)
            waited_s = time.monotonic() - start
            if waited_s < self._spin_s:
                continue
            self._check(rank, waited_s)
            sleep_on(self._address(rank, kind), seen, self._slice)

    def _check(self, rank: int, waited_s: float) -> None:
        if waited_s > self._timeout_s:
            raise RuntimeError(
                f"Timed out after {self._timeout_s:g} s: rank {rank} has not made the call that this rank waits in."
            )
        descriptor = self._processes.get(rank)
        if descriptor is None:
            raise RuntimeError("This rank has left the process group.")
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        with contextlib.suppress(InterruptedError):
            if end.poll(0):
                raise RuntimeError(f"Connection closed by peer: the process of rank {rank} has ended.")


def _left(rank: int) -> RuntimeError:
    return RuntimeError(f"Connection closed by peer: rank {rank} has left the process group.")


def _word(rank: int, kind: int) -> int:
    return (rank * _ROW_BYTES) // 4 + kind


def _description(rank: int, number: int) -> int:
    return rank * _ROW_BYTES + LINE_BYTES + (number % DESCRIPTIONS) * _DESCRIPTION.size


def _reached(seen: int, number: int) -> bool:
    """Whether a counter has reached `number`; counters wrap around."""
    return (seen - number) & _MASK < 2**31
