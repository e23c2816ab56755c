"""Memory that several processes on one host can map and that cannot outlive them.

Here: anonymous kernel memory (`memfd_create`) which other processes of the same user reach through
`/proc/PID/fd/N`. Not here: what is kept in it (`shared_memory.py`).

Why not named segments in /dev/shm: a name survives a `kill -9` of every process that knew it, and containers
often limit /dev/shm to 64 MB. A memfd has no name to leave behind and only the machine's memory as its limit.
This module does not import torch, because the driver creates a segment before any worker has started.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import secrets
import sys
from pathlib import Path

__all__ = ["Segment", "machine_here", "memory_available", "why_not_supported"]


class Segment:
    """A piece of shared memory; whoever creates it keeps the file descriptor open as long as others may attach."""

    def __init__(self, descriptor: int, address: str, size_bytes: int) -> None:
        self._descriptor: int | None = descriptor
        self.address = address
        self.size_bytes = size_bytes
        self.memory = mmap.mmap(descriptor, size_bytes)

    @classmethod
    def create(cls, size_bytes: int, name: str) -> Segment:
        """New zeroed memory, all of it reserved now: a later write can not fail for want of space (`OSError` here)."""
        # Numbers of processes and descriptors are given out again; a name that is drawn tells one segment from another.
        unique = f"{name}-{secrets.token_hex(6)}"
        descriptor = os.memfd_create(unique, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}#{unique}", size_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, address: str) -> Segment:
        """The segment that another process created under `address`; `OSError` if it is gone."""
        path, _, name = address.partition("#")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if name and os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{name} (deleted)":
                raise FileNotFoundError(errno.ENOENT, "that memory is gone, and its place taken by another", path)
            segment = cls(descriptor, address, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)  # the mapping stays
        segment._descriptor = None
        return segment

    def close_descriptor(self) -> None:
        """Nobody new can attach any more; the mappings that exist stay valid."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def machine_here() -> str:
    """A name that two processes have in common if and only if they share kernel, processes and network.

    Then one can attach to a segment of the other's. That the network must be the same, too, makes a host of each
    network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ":".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])


def why_not_supported() -> str | None:
    """The reason why workers on this machine cannot share memory this way, or None if they can."""
    if sys.platform != "linux":
        return f"shared-memory exchange needs Linux (this is {sys.platform})"
    if platform.machine() not in ("x86_64", "AMD64"):
        # The barrier relies on stores becoming visible in program order, which only x86 promises without fences.
        return f"shared-memory exchange needs an x86-64 processor (this is {platform.machine()})"
    try:
        os.close(os.memfd_create("syncline-probe"))
    except (OSError, AttributeError) as error:
        return f"this system refuses anonymous shared memory ({error})"
    return None


def memory_available() -> int:
    """Bytes that could be taken now without swapping, by the machine's and the control group's account."""
    available = [_machine_available()]
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None:
        # What is used counts files that were read and could be forgotten at once.
        available.append(max(0, limit - used + _cgroup_forgettable()))
    return min(available)


def _machine_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def _cgroup_forgettable() -> int:
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _cgroup_number(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
