"""The kernel's futex: sleeping until a word of shared memory changes, and waking those who sleep.

Here: the two system calls. A process sleeps only if the word still holds the value that it has read, so a wake-up
cannot be missed. Not here: what the words count (`barrier.py`, `post_counters.py`, `channel.py`).
"""

from __future__ import annotations

import ctypes
from typing import Any

_SYS_FUTEX_X86_64 = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)


class Timespec(ctypes.Structure):
    """C's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> Timespec:
        return cls(int(seconds), int(seconds % 1 * 1e9))


def wake(address: int) -> None:
    """Wake all processes that sleep on the word at `address`."""
    _libc.syscall(_SYS_FUTEX_X86_64, ctypes.c_void_p(address), _FUTEX_WAKE, _ALL, None)


def sleep_on(address: int, seen: int, limit: Timespec) -> None:
    """Sleep until the word at `address` is woken, at most for `limit`; not at all if it is no longer `seen`."""
    word, until = ctypes.c_uint32(seen), ctypes.byref(limit)
    _libc.syscall(_SYS_FUTEX_X86_64, ctypes.c_void_p(address), _FUTEX_WAIT, word, until)


def address_of(region: Any) -> int:
    """Where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(region))
