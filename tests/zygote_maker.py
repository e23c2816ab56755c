"""Zygotes for the runs of tests, forked from one process that has imported torch already.

Importing torch costs each run three seconds of processor time, and there are hundreds of runs. Here: `ForkedZygote`,
which replaces `subprocess.Popen` in `LocalEngine`; and, run as a program, the process that forks. Such a zygote is a
child of the process that requested it, has the arguments, environment, folder and descriptors that it was given, and
otherwise is the zygote that users have. Tests marked `own_zygote` start real ones.

    tests --> holder --> maker --> (a process that exits at once) --> zygote, which the tests then inherit
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

MOST_BYTES = 200_000
HOLD = """
import subprocess, sys
name = "syncline" + ".engines.zygote"  # tests find zygotes by this name, and must not find their holder
sys.exit(subprocess.call([*sys.argv[1:], name], close_fds=False))
"""

# Threads that made two makers at once would take the right to adopt their zygotes from each other.
_ONE_AT_A_TIME = threading.Lock()


class ForkedZygote:
    """The part of `subprocess.Popen` that `LocalEngine` uses."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: dict[str, str],
        stdin: int,
        start_new_session: bool,
    ) -> None:
        assert stdin == subprocess.DEVNULL
        assert start_new_session
        assert arguments[1:3] == ["-m", "syncline.engines.zygote"]
        order = {"arguments": arguments[3:], "descriptors": pass_fds, "env": env, "folder": os.getcwd()}
        with _ONE_AT_A_TIME:
            self.pid = _maker().fork(order, [*pass_fds, 2])
        self._ended = os.pidfd_open(self.pid)
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code."""
        if self._code is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("zygote", timeout or 0)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._ended)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)


def makers() -> set[int]:
    """The processes that stay for the next test."""
    if not _maker.cache_info().currsize:
        return set()
    holder = _maker().holder.pid
    return {holder, *map(int, Path("/proc", str(holder), "task", str(holder), "children").read_text().split())}


class _Fork:
    """The connection to a process that forks zygotes and is itself a fork of this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._start(theirs)

    def _start(self, theirs: socket.socket) -> None:
        if os.fork() == 0:
            try:
                self._socket.close()
                serve(theirs)
            finally:
                os._exit(0)

    def fork(self, order: dict[str, object], descriptors: list[int]) -> int:
        message = json.dumps(order).encode()
        assert len(message) < MOST_BYTES
        with _inheriting():
            socket.send_fds(self._socket, [message], descriptors)
            return int(self._socket.recv(100))


class _Maker(_Fork):
    """The connection to a process that forks zygotes, started as a program of its own."""

    def _start(self, theirs: socket.socket) -> None:
        self.holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


@functools.cache
def _maker() -> _Maker:
    return _Maker()


def use_a_fork_of_this_process() -> None:
    """Fork zygotes from a fork of this process as it is now, which has imported torch and has no threads yet."""
    global _maker
    maker = _Fork()
    _maker = lambda: maker  # noqa: E731  # type: ignore[assignment]


@contextlib.contextmanager
def _inheriting() -> Iterator[None]:
    """Adopt descendants whose parent exits meanwhile."""
    set_child_subreaper = 36
    prctl = ctypes.CDLL(None).prctl
    prctl(set_child_subreaper, 1)
    try:
        yield
    finally:
        prctl(set_child_subreaper, 0)


# The process that forks


def main() -> None:
    from syncline.workers.quick_start import without_compiler

    import_what_workers_import()
    without_compiler()
    gc.freeze()  # as in warm_process.py
    serve(socket.socket(fileno=int(sys.argv[1])))


def import_what_workers_import() -> None:
    """The imports that forking saves: those of every zygote, and those that nearly each worker does later."""
    for name in (
        "numpy.random",
        "torch.utils.serialization",
        "syncline.comms.process_group",
        "syncline.compute.dropout_operators",
        "syncline.engines.zygote",
        "syncline.strategies.overlap",
        "syncline.strategies.reducers",
        "syncline.workers.entry",
    ):
        importlib.import_module(name)


def serve(orders: socket.socket) -> None:
    """Fork a zygote for each order, until the other end is closed."""
    while True:
        message, descriptors, *_ = socket.recv_fds(orders, MOST_BYTES, 64)
        if not message:
            return
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            if (zygote := os.fork()) == 0:
                orders.close()
                os.close(reading)
                os.close(writing)
                _become_zygote(json.loads(message), descriptors)
            os.write(writing, str(zygote).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(between, 0)
        orders.send(os.read(reading, 100))
        for descriptor in (reading, *descriptors):
            os.close(descriptor)


def _become_zygote(order: dict[str, object], received: list[int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _take_descriptors(received, [*order["descriptors"], 2])
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["folder"])
        tempfile.tempdir = None
        ours, theirs = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [order["folder"], *filter(None, theirs), *(p for p in sys.path if p not in (ours, *theirs))]
        sys.argv = ["zygote", *order["arguments"]]
        from syncline.engines import zygote

        zygote.main()
        code = 0
    finally:
        os._exit(code)


def _take_descriptors(have: list[int], want: list[int]) -> None:
    """Give the received descriptors the numbers that they have in the sending process."""
    aside = [os.dup2(fd, 512 + k, inheritable=False) for k, fd in enumerate(have)]
    for fd in have:
        os.close(fd)
    for fd, number in zip(aside, want, strict=True):
        os.dup2(fd, number)
        os.close(fd)


if __name__ == "__main__":
    main()
