"""The process from which workers are forked.

Importing torch takes more than a second, and every worker needs it. So one process imports it once, computes nothing,
and forks: starting a worker, or its replacement, then takes milliseconds. Because it never computes, the zygote has no
threads and no device, which makes forking safe.

Here: the zygote's own program, started as `python -m syncline.engines.zygote KILLS_AT_ONCE FD [NAMESPACE FDS]`. Not
here: its owner (`local.py`). They exchange JSON lines over a socket. When the owner ends, the zygote asks the workers
to save and stop, and kills them after a grace period, so that no process is left even if the driver is killed. With
KILLS_AT_ONCE it kills them immediately, unless the owner announced its end: then the owner is a node agent, and the
driver continues with other workers.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from syncline.compute.processes import die_with_parent

_GRACE_S = 7.0


def main() -> None:
    """Import what workers need, then fork on demand until the owner ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kills_at_once = sys.argv[1] == "1"
    owner = socket.socket(fileno=int(sys.argv[2]))
    from syncline.workers import entry  # the import that all workers share  # noqa: F401
    from syncline.workers.quick_start import without_compiler

    without_compiler()
    Zygote(owner, [int(text) for text in sys.argv[3:]], kills_at_once=kills_at_once).serve()


class Zygote:
    """Forks workers and notifies the owner when one has ended."""

    def __init__(self, owner: socket.socket, namespaces: Sequence[int] = (), *, kills_at_once: bool = False) -> None:
        self._owner, self._namespaces = owner, namespaces
        self._has_time = not kills_at_once
        self._folders: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(owner, selectors.EVENT_READ)
        self._workers: dict[int, tuple[int, int, int]] = {}  # pid -> (worker_id, life, pidfd)
        self._received = b""

    def serve(self) -> None:
        """Run until the owner closes its end of the socket."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._owner:
                    data = self._receive()
                    if not data:
                        self._end_workers()
                        return
                    self._received += data
                    while b"\n" in self._received:
                        line, self._received = self._received.split(b"\n", 1)
                        self._handle(json.loads(line))
                else:
                    self._reap(key.data)

    def _receive(self) -> bytes:
        try:
            return self._owner.recv(65536)
        except OSError:
            return b""

    def _handle(self, order: dict[str, Any]) -> None:
        if order["do"] == "launch":
            pid = os.fork()
            if pid == 0:
                self._become_worker(order)
            descriptor = os.pidfd_open(pid)
            self._workers[pid] = (order["spec"]["worker_id"], order["spec"]["life"], descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, data=pid)
        elif order["do"] == "kill":
            self._signal_all(signal.SIGKILL, order["worker_id"])
        elif order["do"] == "end":
            self._has_time = True
        elif order["do"] == "remove-at-exit":
            self._folders.append(order["folder"])

    def _reap(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        worker_id, life, descriptor = self._workers.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(status)
        report = {"worker_id": worker_id, "life": life, "pid": pid, "code": None, "signal": None}
        report["code" if code >= 0 else "signal"] = abs(code)
        try:
            self._owner.sendall(json.dumps(report).encode() + b"\n")
        except OSError:
            return  # the owner has ended; `serve` will notice

    def _end_workers(self) -> None:
        """The owner has ended. Workers save and stop at their next step; those that do not are killed."""
        self._selector.unregister(self._owner)
        self._signal_all(signal.SIGTERM if self._has_time else signal.SIGKILL)
        deadline = time.monotonic() + _GRACE_S
        while self._workers:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                self._reap(key.data)
            if not ready:
                self._signal_all(signal.SIGKILL)
                deadline = time.monotonic() + 1.0
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _signal_all(self, number: int, only: int | None = None) -> None:
        for worker_id, _, descriptor in self._workers.values():
            if only not in (None, worker_id):
                continue
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                continue

    def _become_worker(self, order: dict[str, Any]) -> NoReturn:
        code = 1
        try:
            self._owner.close()
            self._selector.close()
            for _, _, descriptor in self._workers.values():
                os.close(descriptor)
            die_with_parent()
            if order["namespace"] is not None:
                _enter(order["namespace"])
            for descriptor in self._namespaces:  # must not outlive the run in a process that the worker starts
                os.close(descriptor)
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, order["log_mode"])
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a real stream in this process
            import msgspec

            from syncline.comms.control import LaunchSpec
            from syncline.workers.entry import run_worker

            code = run_worker(msgspec.convert(order["spec"], LaunchSpec))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: the worker must not run the exit handlers of the zygote.
            os._exit(code)


def _enter(namespace: int) -> None:
    """Move this thread, the only one so far, and all processes that it starts into this network namespace."""
    network = 0x40000000
    if ctypes.CDLL(None, use_errno=True).setns(namespace, network):
        number = ctypes.get_errno()
        raise OSError(number, f"Cannot enter the worker's network namespace: {os.strerror(number)}")


if __name__ == "__main__":
    main()
