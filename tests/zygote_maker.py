"""Zygotes for the runs of tests, forked from one process that has imported torch already.

Importing it costs each run three seconds of processor time, and there are hundreds of runs. Here: `ForkedZygote`, to be
used where `LocalEngine` starts a process; and, run as a program, the process that forks. A zygote made so is the child
of whoever asked for it, has the arguments, environment, folder and descriptors that it was given, and is in every other
way the one that users have. Runs that are started by a command have real ones, as do tests marked `own_zygote`.

    tests --> holder --> maker --> (a process that is gone at once) --> zygote, which the tests then inherit
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
name = "syncline" + ".engines.zygote"  # by which a zygote is known, and its holder must not be
sys.exit(subprocess.call([*sys.argv[1:], name], close_fds=False))
"""


class ForkedZygote:
    """What `LocalEngine` needs of `subprocess.Popen`."""

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
        self.pid = _maker().fork(order, [*pass_fds, 2])
        self._ended = os.pidfd_open(self.pid)
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once."""
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


class _Maker:
    """The connection to the process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self.holder = subprocess.Popen(
                [sys.executable, "-c", HOLD, sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(self, order: dict[str, object], descriptors: list[int]) -> int:
        message = json.dumps(order).encode()
        assert len(message) < MOST_BYTES
        with self._lock, _inheriting():
            socket.send_fds(self._socket, [message], descriptors)
            return int(self._socket.recv(100))


@functools.cache
def _maker() -> _Maker:
    return _Maker()


@contextlib.contextmanager
def _inheriting() -> Iterator[None]:
    """Whose parent ends meanwhile becomes a child of this process."""
    set_child_subreaper = 36
    prctl = ctypes.CDLL(None).prctl
    prctl(set_child_subreaper, 1)
    try:
        yield
    finally:
        prctl(set_child_subreaper, 0)


# The process that forks


def main() -> None:
    from syncline.workers import entry  # the import that is to be saved  # noqa: F401
    from syncline.workers.quick_start import without_compiler

    without_compiler()
    orders = socket.socket(fileno=int(sys.argv[1]))
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
    """Give descriptors the numbers that they have where they come from."""
    aside = [os.dup2(fd, 512 + k, inheritable=False) for k, fd in enumerate(have)]
    for fd in have:
        os.close(fd)
    for fd, number in zip(aside, want, strict=True):
        os.dup2(fd, number)
        os.close(fd)


if __name__ == "__main__":
    main()
