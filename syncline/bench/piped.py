"""Processes of a bench that are told through a pipe what to measure.

Here: starting one, hearing what it says, and its end. Not here: what it measures (the suites), and commands that are
measured as a whole (`processes.py`).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from syncline.errors import SynclineError

__all__ = ["LIMIT_S", "hear", "piped"]

LIMIT_S = 60.0
"""How long an answer, or an end, is waited for."""


@contextmanager
def piped(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that calls `target` with its end of a pipe and the `arguments`; it ends when the pipe does."""
    # The fork server loads torch once for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["syncline.bench.servers", "syncline.bench.allreduce", "syncline.bench.crews"])
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


def hear(connection: Connection) -> Any:
    """What the process says next."""
    if not connection.poll(LIMIT_S):
        raise SynclineError(f"A process of the bench gave no answer within {LIMIT_S:g} s.")
    return connection.recv()
