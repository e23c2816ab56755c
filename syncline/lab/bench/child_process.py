"""Child processes of a bench that receive requests through a pipe.

Here: starting one, receiving its replies, ending it. Not here: what it measures (the suites), and commands that are
measured as a whole (`processes.py`).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed

from syncline.comms.store import connect_store
from syncline.errors import SynclineError

LIMIT_S = 60.0
"""Timeout of a reply, and of the exit."""


@contextmanager
def child_process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that calls `target` with its end of a pipe and the `arguments`; it ends when the pipe is closed."""
    # The fork server loads torch once for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.{name}" for name in ("servers", "allreduce", "worker_groups")])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()


def join_gloo(port: int, rank: int, size: int, limit_s: float = LIMIT_S) -> None:
    """Join the gloo group of `size` processes of this host that meet at the store on `port`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, limit = connect_store("127.0.0.1", port, "bench", limit_s), timedelta(seconds=limit_s)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def receive(connection: Connection) -> Any:
    """The next message of the process."""
    if not connection.poll(LIMIT_S):
        raise SynclineError(f"A bench process did not respond within {LIMIT_S:g} s.")
    return connection.recv()
