"""A barrier between processes that costs microseconds, made of one counter per rank and the kernel's futex.

Here: arriving, spinning briefly, sleeping in the kernel, being aborted. Not here: what is exchanged between two
barriers (`shared_memory.py`).

Each rank owns one 32-bit counter on its own cache line, so no atomic read-modify-write is needed: a rank stores its
new count, wakes whoever sleeps on that word, and waits until every other counter has caught up. A futex sleeps only
if the word still holds the value that was read, so a wake-up cannot be missed.
"""

from __future__ import annotations

import ctypes
import mmap
import time

from syncline.errors import PeerLost

__all__ = ["LINE_BYTES", "SharedBarrier"]

LINE_BYTES = 64
"""One cache line: counters of different ranks must not share one, or they slow each other down."""

_SYS_FUTEX_X86_64 = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_MASK = 2**32 - 1
_SLICE_S = 0.2  # the longest sleep in one go: bounds how late an abort that raced with falling asleep is seen

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedBarrier:
    """All ranks arrive, all ranks leave. Uses `(size + 1) * LINE_BYTES` bytes of `memory` from `offset` on."""

    def __init__(
        self, memory: mmap.mmap, offset: int, *, rank: int, size: int, spin_s: float, timeout_s: float
    ) -> None:
        self.rank, self.size = rank, size
        self.waited_s = 0.0
        """For how long this rank has waited for others so far."""
        self._spin_s, self._timeout_s = spin_s, timeout_s
        region = memoryview(memory)[offset : offset + self.bytes_needed(size)]
        self._words = region.cast("I")
        self._stride = LINE_BYTES // 4
        first = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self._addresses = [first + r * LINE_BYTES for r in range(size + 1)]
        self._aborted_index = size * self._stride
        self._count = self._words[rank * self._stride]
        self._others = [r for r in range(size) if r != rank]
        self._slice = _Timespec(0, int(_SLICE_S * 1e9))

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Memory for `size` ranks: a line each, and one for the abort flag."""
        return (size + 1) * LINE_BYTES

    def wait(self) -> None:
        """Return when every rank has called `wait` as often as this one; `PeerLost` if aborted or after the limit.

        A barrier to which everybody came is complete, even if somebody aborts on leaving it: what was agreed there
        stands, and whoever is slow to leave must still learn of it.
        """
        if self._words[self._aborted_index]:
            raise _aborted()
        self._count = count = (self._count + 1) & _MASK
        words, stride = self._words, self._stride
        words[self.rank * stride] = count
        _libc.syscall(_SYS_FUTEX_X86_64, ctypes.c_void_p(self._addresses[self.rank]), _FUTEX_WAKE, _EVERYBODY, None)
        for other in self._others:
            index = other * stride
            if (words[index] - count) & _MASK >= 2**31:  # the other one is behind; counters may wrap around
                since = time.perf_counter()
                self._wait_for(other, index, count)
                self.waited_s += time.perf_counter() - since

    def abort(self) -> None:
        """Wake everybody on every rank with `PeerLost`, now and at every later `wait`."""
        self._words[self._aborted_index] = 1
        for address in self._addresses:
            _libc.syscall(_SYS_FUTEX_X86_64, ctypes.c_void_p(address), _FUTEX_WAKE, _EVERYBODY, None)

    def _wait_for(self, other: int, index: int, count: int) -> None:
        words = self._words
        start = time.monotonic()
        spin_until = start + self._spin_s
        while True:
            seen = words[index]
            if (seen - count) & _MASK < 2**31:
                return
            if words[self._aborted_index]:
                # Whoever aborted may have come first: only a count that is still behind now will stay behind.
                if (words[index] - count) & _MASK < 2**31:
                    return
                raise _aborted()
            now = time.monotonic()
            if now < spin_until:
                continue
            if now - start > self._timeout_s:
                raise PeerLost(f"Worker {other} did not come to the exchange within {self._timeout_s:g} s.")
            address = ctypes.c_void_p(self._addresses[other])
            _libc.syscall(_SYS_FUTEX_X86_64, address, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(self._slice))


def _aborted() -> PeerLost:
    return PeerLost("The exchange was aborted because another worker is gone.")
