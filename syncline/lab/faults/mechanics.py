"""How each fault is done to the current process.

Here: signals, packet filters, closed connections, a full disk. Not here: when (`injector.py`).

Network faults use a packet filter that the kernel runs on each packet arriving on a TCP connection; that needs no
privileges. Shared memory is no network and stays untouched. A full disk is an `os.fsync` that fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from syncline.compute.processes import die_with_parent


class ScriptedFault(RuntimeError):
    """Raised by `raise in worker ...`. Not a SynclineError, so that it counts as the user's."""


def stop(pid: int, for_s: float | None) -> None:
    """SIGSTOP, and SIGCONT after `for_s`."""
    if for_s is not None:
        # A stopped process cannot wake itself up. The shell that does must not outlive this process.
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {for_s:.6f}; kill -CONT {pid}"],
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    os.kill(pid, signal.SIGSTOP)


_REPLY_TIMEOUT_S = 20.0


def cut_link(links: str, worker_id: int, for_s: float | None) -> None:
    """Ask the owner of the links, which outlives this process and so can restore the link after the time."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_REPLY_TIMEOUT_S)
        with short_path(Path(links)) as path:
            connection.connect(path)
        connection.sendall(json.dumps([worker_id, for_s]).encode())
        answer = connection.recv(4096).decode()
    if answer != "done":
        raise RuntimeError(f"Cannot cut the link of worker {worker_id}: {answer or 'no reply'}")


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another name of the same file: the address of a Unix socket is limited to 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


_Program = bytes
"""A classic BPF program; it returns how many bytes of a packet to keep."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_LOAD, _IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
"""The address at which a program reads a random 32-bit number."""
_ATTACH_EVERY_S = 0.02


def drop_all() -> _Program:
    return _instruction(_RETURN, 0)


def drop_some(fraction: float) -> _Program:
    limit = min(round(fraction * 2**32), 2**32 - 1)
    return b"".join(
        [
            _instruction(_LOAD, _RANDOM),
            _instruction(_IF_AT_LEAST, limit, then=0, otherwise=1),
            _instruction(_RETURN, 0xFFFFFFFF),
            _instruction(_RETURN, 0),
        ]
    )


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)


def filter_packets(program: _Program, until: float) -> None:
    """Filter the packets that arrive on this process's TCP connections until then, including new connections."""
    _attach(program)

    def attach_until_over() -> None:
        while time.time() < until:
            time.sleep(_ATTACH_EVERY_S)
            _attach(program)
        for connection in _connections():
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    threading.Thread(target=attach_until_over, name="syncline-faults", daemon=True).start()


def _attach(program: _Program) -> None:
    memory = ctypes.create_string_buffer(program)
    described = struct.pack("HL", len(program) // 8, ctypes.addressof(memory))
    for connection in _connections():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def disconnect() -> None:
    for connection in _connections():
        with contextlib.suppress(OSError):  # already closed
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # listeners stay open
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[socket.socket]:
    """Duplicates of every TCP socket of this process, including those of libraries."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a socket, or closed by now
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def fill_disk(until: float) -> None:
    """Let `os.fsync` fail: that is where a file system reports a full disk at the latest."""
    real_fsync: Callable[[Any], None] = os.fsync

    def fsync(file: Any) -> None:
        if time.time() < until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(file)

    os.fsync = fsync  # type: ignore[assignment]  # parameter names differ
