"""The TCP sockets of this process, among them those that libraries have opened and do not reveal.

Here: finding them, and making a listening one drop new connections. Not here: when to do that (`torch_group.py` for
gloo, `accept_guard.py` for ZeroMQ).

A library's listening socket is not ours to close: its event loop would find an invalid descriptor, or one that has been
given to another file by then, and end the process. A socket filter leaves the descriptor alone. The kernel drops every
packet that is meant for the listening socket itself: to strangers it looks like a port behind a firewall, and the
library is never woken. Connections that were established before are sockets of their own, and stay as they are.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterator

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux; the socket module does not have them
_RETURN = 0x06  # BPF_RET | BPF_K: keep that many bytes of the packet; 0 drops it


def connections() -> Iterator[tuple[int, socket.socket]]:
    """The TCP connections of this process, each with its inode number; valid only until the next one is yielded."""
    return _tcp_sockets(is_listening=False)


def listeners() -> Iterator[tuple[int, socket.socket]]:
    """The listening TCP sockets of this process, each with its inode number; likewise."""
    return _tcp_sockets(is_listening=True)


def drop_new_connections(listener: socket.socket) -> bool:
    """From now on, connection attempts time out. False if the system has no socket filters; then nothing changes."""
    instruction = array.array("B", struct.pack("HBBI", _RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, instruction.buffer_info()[0])
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:
        return False
    return True


def accept_new_connections(listener: socket.socket) -> None:
    """Undo `drop_new_connections`: later attempts are accepted again."""
    with contextlib.suppress(OSError):  # it had no filter
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _tcp_sockets(*, is_listening: bool) -> Iterator[tuple[int, socket.socket]]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a socket, or closed in the meantime
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                if is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == is_listening:
                    yield os.fstat(found.fileno()).st_ino, found
