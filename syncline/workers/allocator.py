"""Keeping memory that will be needed again.

Training frees and takes the same large pieces of memory in every step. By default the C library gives them back to the
system each time, and the page faults on taking them again cost LeNet a fifth of its step. Here the library is asked to
keep them, in this process, unless the user has told it otherwise.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_memory"]

# glibc's names for them (malloc.h): what to pass to mallopt, and the environment variable of the same meaning.
_SETTINGS = (
    (-1, "MALLOC_TRIM_THRESHOLD_", 256 * 2**20),
    (-3, "MALLOC_MMAP_THRESHOLD_", 32 * 2**20),  # it takes no more
)


def keep_memory() -> None:
    """From now on. Nothing happens where the C library has no such thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, variable, size in _SETTINGS:
        if variable not in os.environ:
            mallopt(parameter, size)
