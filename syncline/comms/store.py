"""torch's key-value store for rendezvous, bound to the interface it is needed on.

Here: hosting it (coordinator) and connecting to it (workers). torch's TCPStore listens on all interfaces unless it is
handed a socket that is already bound, so it is handed one.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not export them by name

__all__ = ["connect_store", "host_store"]


def host_store(host: str) -> tuple[TCPStore, int]:
    """A new store listening on `host` only, and its port."""
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        # TCPStore takes over the descriptor and closes it with the store.
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
    return store, port


def connect_store(host: str, port: int, prefix: str, timeout_s: float) -> PrefixStore:
    """The coordinator's store, under a prefix of its own for each View."""
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(prefix, store)
