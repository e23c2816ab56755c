"""A mutex in shared memory that survives the death of its holder.

Here: `SharedLock`, the robust process-shared mutex of POSIX threads, through glibc. Not here: the memory it lies in
(`segment.py`, `Collective.allocate_shared`), and what it protects.

Why not a futex word of our own: Python has no atomic compare-and-swap, and only the kernel knows when a holder has
died, for mutexes on its `robust_list`. The next process to acquire such a mutex learns that the protected data may be
half written. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from syncline.comms.futex import Timespec
from syncline.errors import PeerFailed

if TYPE_CHECKING:
    import torch

LOCK_BYTES = 64
"""The size of one lock: glibc's mutex of 40 bytes, and the rest of its cache line."""

_READY_AT = 56  # after the mutex: a word that says that it was initialized
_READY = 0x53594E434C4F434B
_ALIGN_BYTES = 8
_SLICE_S = 0.2  # the longest wait in one go: bounds how late Ctrl-C is seen

# As in glibc's pthread.h and the kernel's time.h.
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_PTHREAD_MUTEX_ERRORCHECK = 2
_CLOCK_MONOTONIC = 1

_libc = ctypes.CDLL(None)


class SharedLock:
    """The lock at `offset` of `memory`, which all its users map; only the thread that acquired it may release it.

    Exactly one process calls `SharedLock.initialize`, before any other makes its `SharedLock` of the same memory.
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
    def initialize(cls, memory: mmap.mmap | memoryview | torch.Tensor, offset: int = 0) -> SharedLock:
        """Turn `LOCK_BYTES` bytes of `memory`, with any content, into a free lock."""
        lock = cls(memory, offset)
        ctypes.memset(lock._mutex, 0, LOCK_BYTES)
        attributes = ctypes.create_string_buffer(LOCK_BYTES)  # glibc needs 4 bytes of it
        _succeed("pthread_mutexattr_init", attributes)
        _succeed("pthread_mutexattr_setpshared", attributes, _PTHREAD_PROCESS_SHARED)
        _succeed("pthread_mutexattr_setrobust", attributes, _PTHREAD_MUTEX_ROBUST)
        # A thread that acquires it twice gets an error at once, and not a timeout that blames another worker.
        _succeed("pthread_mutexattr_settype", attributes, _PTHREAD_MUTEX_ERRORCHECK)
        _succeed("pthread_mutex_init", lock._mutex, attributes)
        _succeed("pthread_mutexattr_destroy", attributes)
        lock._ready.value = _READY
        return lock

    def acquire(self, timeout_s: float) -> bool:
        """Acquire the lock. True if the previous holder died with it, so that the protected data may be half written.

        `PeerFailed` if it is not free within `timeout_s`.
        """
        assert self._ready.value == _READY, "This memory holds no lock: one process must call SharedLock.initialize."
        until = time.monotonic() + timeout_s
        while True:
            result = self._wait_until(min(until, time.monotonic() + _SLICE_S))
            if result != errno.ETIMEDOUT or time.monotonic() >= until:
                break
        if result == errno.EOWNERDEAD:
            _succeed("pthread_mutex_consistent", self._mutex)
            return True
        if result == errno.ETIMEDOUT:
            raise PeerFailed(
                f"A lock shared by the workers was not free within {timeout_s:g} s. The worker that holds it is alive: "
                "it hangs, was stopped, or needs more time.",
                code="timeout",
                timeout_s=timeout_s,
            )
        if result == errno.EDEADLK:
            raise RuntimeError("This thread already holds the lock, and can acquire it only once.")
        assert result == 0, f"pthread_mutex_clocklock failed: {errno.errorcode.get(result, result)}."
        return False

    def release(self) -> None:
        """On the thread that acquired it."""
        _succeed("pthread_mutex_unlock", self._mutex)

    @contextlib.contextmanager
    def held(self, timeout_s: float) -> Iterator[bool]:
        """Hold the lock within the block; yields whether the previous holder died with it (see `acquire`)."""
        holder_died = self.acquire(timeout_s)
        try:
            yield holder_died
        finally:
            self.release()

    def _wait_until(self, moment_s: float) -> int:
        seconds = int(moment_s)
        moment = Timespec(seconds, int((moment_s - seconds) * 1e9))
        # The monotonic clock (glibc 2.30 and later); pthread_mutex_timedlock uses the wall clock, which may be set.
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
        raise ValueError("A lock needs contiguous CPU memory.")
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
