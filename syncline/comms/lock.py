"""A mutex in shared memory that the death of its holder does not lock for ever.

Here: `SharedLock`, the robust process-shared mutex of POSIX threads, through glibc. Not here: the memory it lies in
(`segment.py`, `Collective.share`), and what it protects.

Why not a futex word of our own: Python has no atomic compare-and-swap, and only the kernel can tell when a holder has
died, for mutexes that it was told of (`robust_list`). The next one to take such a mutex learns that what it protects
may be half written. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from syncline.errors import PeerLost

if TYPE_CHECKING:
    import torch

__all__ = ["LOCK_BYTES", "SharedLock"]

LOCK_BYTES = 64
"""What one lock takes: glibc's mutex of 40 bytes, and the rest of its cache line."""

_READY_AT = 56  # beyond the mutex: a word that says that it was initialised
_READY = 0x53594E434C4F434B
_ALIGN_BYTES = 8
_SLICE_S = 0.2  # the longest wait in one go: bounds how late Ctrl-C is seen

# As in glibc's pthread.h and the kernel's time.h.
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_PTHREAD_MUTEX_ERRORCHECK = 2
_CLOCK_MONOTONIC = 1

_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedLock:
    """The lock at `offset` of `memory`, which every process that uses it maps; it belongs to the thread that took it.

    Exactly one process calls `SharedLock.initialise`, before any other makes its `SharedLock` of the same memory.
    """

    def __init__(self, memory: mmap.mmap | memoryview | torch.Tensor, offset: int = 0) -> None:
        self._memory, first = _locate(
            memory, offset
        )  # kept, so that the memory stays mapped as long as the lock is used
        if first % _ALIGN_BYTES:
            raise ValueError(f"A lock must lie at a multiple of {_ALIGN_BYTES} bytes, not at {offset} of this memory.")
        self._mutex = ctypes.c_void_p(first)
        self._ready = ctypes.c_uint64.from_address(first + _READY_AT)

    @classmethod
    def initialise(cls, memory: mmap.mmap | memoryview | torch.Tensor, offset: int = 0) -> SharedLock:
        """Make a lock that nobody holds out of `LOCK_BYTES` bytes of `memory`, whatever they hold."""
        lock = cls(memory, offset)
        ctypes.memset(lock._mutex, 0, LOCK_BYTES)
        attributes = ctypes.create_string_buffer(LOCK_BYTES)  # glibc needs 4 bytes of it
        _succeed("pthread_mutexattr_init", attributes)
        _succeed("pthread_mutexattr_setpshared", attributes, _PTHREAD_PROCESS_SHARED)
        _succeed("pthread_mutexattr_setrobust", attributes, _PTHREAD_MUTEX_ROBUST)
        # So that whoever takes it twice is told at once, and not after the limit that somebody else is slow.
        _succeed("pthread_mutexattr_settype", attributes, _PTHREAD_MUTEX_ERRORCHECK)
        _succeed("pthread_mutex_init", lock._mutex, attributes)
        _succeed("pthread_mutexattr_destroy", attributes)
        lock._ready.value = _READY
        return lock

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock; whether the holder before died with it, so that what it was writing may be half written.

        `PeerLost` if it is not to be had within `timeout_s`.
        """
        assert self._ready.value == _READY, "This memory holds no lock: one process must call SharedLock.initialise."
        until = time.monotonic() + timeout_s
        while True:
            result = self._wait_until(min(until, time.monotonic() + _SLICE_S))
            if result != errno.ETIMEDOUT or time.monotonic() >= until:
                break
        if result == errno.EOWNERDEAD:
            _succeed("pthread_mutex_consistent", self._mutex)
            return True
        if result == errno.ETIMEDOUT:
            raise PeerLost(
                f"A lock that workers share was not free within {timeout_s:g} s. The worker that holds it is alive but "
                "does not let go of it: it hangs, was stopped, or needs more time than that."
            )
        if result == errno.EDEADLK:
            raise RuntimeError("This thread holds the lock already; it can be taken only once.")
        assert result == 0, f"pthread_mutex_clocklock failed: {errno.errorcode.get(result, result)}."
        return False

    def release(self) -> None:
        """Let go, on the thread that took it."""
        _succeed("pthread_mutex_unlock", self._mutex)

    @contextlib.contextmanager
    def held(self, timeout_s: float) -> Iterator[bool]:
        """Hold the lock within the block; the value is whether the holder before died with it (see `acquire`)."""
        holder_died = self.acquire(timeout_s)
        try:
            yield holder_died
        finally:
            self.release()

    def _wait_until(self, moment_s: float) -> int:
        seconds = int(moment_s)
        moment = _Timespec(seconds, int((moment_s - seconds) * 1e9))
        # By the clock that nobody can set (glibc 2.30 and later); pthread_mutex_timedlock goes by the date.
        result: int = _libc.pthread_mutex_clocklock(self._mutex, _CLOCK_MONOTONIC, ctypes.byref(moment))
        return result


def _locate(memory: mmap.mmap | memoryview | torch.Tensor, offset: int) -> tuple[object, int]:
    """What keeps the lock's memory alive, and the address of its first byte."""
    if isinstance(memory, mmap.mmap | memoryview):
        bytes_here = memoryview(memory).nbytes
        _check_room(bytes_here, offset)
        kept = (ctypes.c_char * bytes_here).from_buffer(memory)
        return kept, ctypes.addressof(kept) + offset
    if memory.device.type != "cpu" or not memory.is_contiguous():
        raise ValueError("A lock needs memory of the CPU without gaps.")
    _check_room(memory.nbytes, offset)
    return memory, memory.data_ptr() + offset


def _check_room(bytes_here: int, offset: int) -> None:
    if not 0 <= offset <= bytes_here - LOCK_BYTES:
        raise ValueError(
            f"A lock takes {LOCK_BYTES} bytes, but the memory ends {bytes_here - offset} bytes after offset {offset}."
        )


def _succeed(name: str, *arguments: object) -> None:
    result = getattr(_libc, name)(*arguments)
    assert result == 0, f"{name} failed: {errno.errorcode.get(result, result)}."
