"""What the kernel knows of this process's network: the connections that are open, the interface that has an address.

For libraries that open sockets by themselves and do not tell, as gloo does. Not here: sockets of our own
(`control.py`, `parameter_server/connection.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

__all__ = ["connections", "interface_of"]


def connections() -> Iterator[tuple[int, socket.socket]]:
    """The TCP connections of this process, whoever opened them, each with its number in the kernel; only lent.

    Sockets that listen are not among them.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or closed in the meantime
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                if is_tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield os.fstat(found.fileno()).st_ino, found


def interface_of(address: str) -> str | None:
    """The network interface of this host that has this IPv4 address; None if there is none.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    ask_for_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(anything, ask_for_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
