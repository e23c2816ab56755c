"""Memory that several processes on one host can map and that cannot outlive them.

Here: anonymous kernel memory (`memfd_create`), which other processes of the same user reach through `/proc/PID/fd/N`,
and the layout of a collective's control segment. Not here: what is exchanged through it (`staging.py`,
`shared_tensors.py`).

Why not named segments in /dev/shm: a name survives a `kill -9` of every process that knew it, and containers often
limit /dev/shm to 64 MB. A memfd has no name to leave behind, and only the machine's memory limits it. This module does
not import torch, because the driver creates a segment before any worker has started.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import secrets
import sys
from pathlib import Path

from syncline.comms.barrier import LINE_BYTES, SharedBarrier

STAGE_BYTES = 256 * 1024
NOTICE_BYTES = 256


class ControlLayout:
    """Offsets in the control segment of a shared-memory collective of `size` ranks.

    barrier lines (one per rank, one for abort) | slots (one line per rank) | notice | staging (two areas per rank)
    """

    def __init__(self, size: int) -> None:
        self.slots = SharedBarrier.bytes_needed(size)
        self.notice = self.slots + size * LINE_BYTES
        self.stage = self.notice + NOTICE_BYTES
        self.total_bytes = self.stage + 2 * size * STAGE_BYTES

    def slot(self, rank: int) -> int:
        """A line for a rank's weight and length in the present call."""
        return self.slots + rank * LINE_BYTES

    def staging(self, rank: int, area: int) -> int:
        """One of a rank's two staging areas."""
        return self.stage + (2 * rank + area) * STAGE_BYTES


class Segment:
    """A piece of shared memory; its creator keeps the file descriptor open as long as others may attach."""

    def __init__(self, descriptor: int, address: str, size_bytes: int) -> None:
        self._descriptor: int | None = descriptor
        self.address = address
        self.size_bytes = size_bytes
        self.memory = mmap.mmap(descriptor, size_bytes)

    @classmethod
    def create(cls, size_bytes: int, name: str) -> Segment:
        """New zeroed memory, reserved at once (`OSError` if there is not enough), so that later writes cannot fail."""
        # The kernel reuses process ids and descriptors; a random name distinguishes segments at one address.
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
                raise FileNotFoundError(errno.ENOENT, "the memory is gone, and another has its address", path)
            segment = cls(descriptor, address, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)  # the mapping stays
        segment._descriptor = None
        return segment

    def close_descriptor(self) -> None:
        """No other process can attach from now on; existing mappings stay valid."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def machine_here() -> str:
    """A name for this host: two processes have the same one if they share the kernel, process ids and the network.

    Then one can attach to the other's segments. Each network namespace counts as a host of its own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ":".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])


def why_not_supported() -> str | None:
    """Why workers on this machine cannot share memory this way; None if they can."""
    if sys.platform != "linux":
        return f"shared-memory exchange needs Linux (this is {sys.platform})"
    if platform.machine() not in ("x86_64", "AMD64"):
        # The barrier relies on stores becoming visible in program order, which only x86 guarantees without fences.
        return f"shared-memory exchange needs an x86-64 processor (this is {platform.machine()})"
    try:
        os.close(os.memfd_create("syncline-probe"))
    except (OSError, AttributeError) as error:
        return f"this system refuses anonymous shared memory ({error})"
    return None


def memory_available() -> int:
    """Bytes that can be allocated now without swapping, by the machine's and the cgroup's counters."""
    available = [_machine_available()]
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None:
        # The usage includes cached files, which the kernel can drop at once.
        available.append(max(0, limit - used + _cgroup_reclaimable()))
    return min(available)


def _machine_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def _cgroup_reclaimable() -> int:
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
