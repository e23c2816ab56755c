"""Keeping freed memory in the process.

Training frees and allocates the same large blocks in every step. By default the C library returns them to the system
each time, and the page faults of the next allocation cost LeNet a fifth of its step. `keep_memory` makes glibc keep
them, unless the user has configured it through the environment. `release_freed` returns them once, after start-up.
"""

from __future__ import annotations

import ctypes
import os

# glibc's parameters (malloc.h): the number for mallopt, and the environment variable with the same meaning.
_SETTINGS = (
    (-1, "MALLOC_TRIM_THRESHOLD_", 256 * 2**20),
    (-3, "MALLOC_MMAP_THRESHOLD_", 32 * 2**20),  # the largest value that glibc accepts
)


def keep_memory() -> None:
    """Has no effect where the C library has no `mallopt`."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, variable, size in _SETTINGS:
        if variable not in os.environ:
            mallopt(parameter, size)


def release_freed() -> None:
    """Return what was freed so far. Start-up takes other blocks than training does, and none of them again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
