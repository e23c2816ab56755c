"""A barrier between processes that costs microseconds, made of one counter per rank and the kernel's futex.

Here: arriving, spinning briefly, sleeping in the kernel, aborting. Not here: what is exchanged between two barriers
(`shared_memory.py`).

Each rank owns one 32-bit counter on its own cache line, so no atomic read-modify-write is needed: a rank stores its
new count, wakes the ranks that sleep on that word, and waits until every other counter has caught up. A futex sleeps
only if the word still holds the value that was read, so a wake-up cannot be missed.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence

from syncline.comms.futex import Timespec, address_of, sleep_on, wake
from syncline.errors import PeerFailed

LINE_BYTES = 64
"""One cache line: counters of different ranks must not share one, or they slow each other down."""

_MASK = 2**32 - 1
_SLICE_S = 0.2  # the longest sleep in one go: bounds how late an abort that raced with falling asleep is seen
_CHECK_PARENT_S = 0.2  # how often a rank that waits in a child barrier checks whether the parent was aborted


class SharedBarrier:
    """All ranks arrive, all ranks leave. Uses `(size + 1) * LINE_BYTES` bytes of `memory` from `offset` on."""

    def __init__(
        self, memory: mmap.mmap, offset: int, *, rank: int, size: int, spin_s: float, timeout_s: float
    ) -> None:
        self.rank, self.size = rank, size
        self.names: Sequence[int] = range(size)
        """How errors name the ranks."""
        self.waited_s = 0.0
        """How long this rank has waited for others so far."""
        self._spin_s, self._timeout_s = spin_s, timeout_s
        region = memoryview(memory)[offset : offset + self.bytes_needed(size)]
        self._words = region.cast("I")
        self._stride = LINE_BYTES // 4
        first = address_of(region)
        self._addresses = [first + r * LINE_BYTES for r in range(size + 1)]
        self._aborted_index = size * self._stride
        self._count = self._words[rank * self._stride]
        self._others = [r for r in range(size) if r != rank]
        self._slice = Timespec.of(_SLICE_S)

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Memory for `size` ranks: a line each, and one for the abort flag."""
        return (size + 1) * LINE_BYTES

    def wait(self) -> None:
        """Return when every rank has called `wait` as often as this one; `PeerFailed` at an abort or the timeout.

        A barrier that all ranks have reached is complete, even if one aborts on leaving it: what they agreed on stands,
        and a rank that is slow to leave must still see it.
        """
        if self._words[self._aborted_index]:
            raise aborted()
        self._count = count = (self._count + 1) & _MASK
        words, stride = self._words, self._stride
        words[self.rank * stride] = count
        wake(self._addresses[self.rank])
        for other in self._others:
            index = other * stride
            if (words[index] - count) & _MASK >= 2**31:  # the other rank is behind; counters may wrap around
                since = time.perf_counter()
                self._wait_for(other, index, count)
                self.waited_s += time.perf_counter() - since

    @property
    def is_aborted(self) -> bool:
        return bool(self._words[self._aborted_index])

    def is_over(self) -> bool:
        """Whether this barrier was aborted, or one above it; for barriers of some of its ranks."""
        return self.is_aborted

    def abort(self) -> None:
        """Make every rank's present and later `wait` raise `PeerFailed`."""
        self._words[self._aborted_index] = 1
        for address in self._addresses:
            wake(address)

    def _wait_for(self, other: int, index: int, count: int) -> None:
        words = self._words
        start = time.monotonic()
        spin_until = start + self._spin_s
        while True:
            seen = words[index]
            if (seen - count) & _MASK < 2**31:
                return
            if words[self._aborted_index]:
                # The other rank may have arrived before it aborted: only a count that is behind now stays behind.
                if (words[index] - count) & _MASK < 2**31:
                    return
                raise aborted()
            now = time.monotonic()
            if now < spin_until:
                continue
            if now - start > self._timeout_s:
                raise timed_out(other, self._timeout_s)
            sleep_on(self._addresses[other], seen, self._slice)


class ChildBarrier(SharedBarrier):
    """A barrier of some of the ranks, whose waits also end when the parent collective is aborted.

    The rank that aborts the parent need not know this barrier, so those that wait here check the parent regularly.
    `names` has the ranks by which errors name the members.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        is_parent_over: Callable[[], bool],
        names: Sequence[int],
        rank: int,
        *,
        spin_s: float,
        timeout_s: float,
    ) -> None:
        super().__init__(memory, 0, rank=rank, size=len(names), spin_s=spin_s, timeout_s=_CHECK_PARENT_S)
        self.names = names
        self._is_parent_over, self._total_timeout_s = is_parent_over, timeout_s

    def wait(self) -> None:
        self._check_parent()
        super().wait()

    def is_over(self) -> bool:
        self._check_parent()
        return self.is_aborted

    def _check_parent(self) -> None:
        if self._is_parent_over():
            self.abort()

    def _wait_for(self, other: int, index: int, count: int) -> None:
        until = time.monotonic() + self._total_timeout_s
        while True:
            # The other rank may arrive and abort between two checks; it is missing only if it was aborted before.
            was_aborted = self.is_aborted
            try:
                return super()._wait_for(other, index, count)
            except PeerFailed:
                if was_aborted:
                    raise
            self._check_parent()
            if time.monotonic() > until and not self.is_aborted:
                raise timed_out(self.names[other], self._total_timeout_s)


def aborted() -> PeerFailed:
    return PeerFailed("The exchange was aborted because another worker failed.", code="aborted")


def timed_out(rank: int, timeout_s: float) -> PeerFailed:
    return PeerFailed(
        f"Rank {rank} did not reach the exchange within {timeout_s:g} s.",
        code="timeout",
        rank=rank,
        timeout_s=timeout_s,
    )
