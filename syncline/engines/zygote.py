"""The process from which workers are forked.

Importing torch takes more than a second, and every worker needs it. So one process imports it once, computes nothing,
and forks: starting a worker, or its replacement, then takes milliseconds. Because it never computes, the zygote has no
threads and no device, which makes forking safe.

Here: the zygote's own program, started as `python -m syncline.engines.zygote KILLS_AT_ONCE FD PREDECESSORS [NAMESPACE
FDS]`. Not here: its owner (`local.py`, `zygote_process.py`). They exchange JSON lines over a socket. When the owner
ends, the zygote asks the workers to save and stop, and kills them after a grace period, so that no process is left
even if the driver is killed. With KILLS_AT_ONCE it kills them immediately, unless the owner announced its end: then the
owner is a node agent, and the driver continues with other workers.

A zygote that is stuck is replaced, and stays for its workers, which die with it. Should the owner end meanwhile, the
kernel continues a stopped zygote, which then ends its workers. If it does not, its successor kills it: PREDECESSORS are
the pidfds of such zygotes, separated by commas, or "-".
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from syncline.compute.processes import PEER_FAILED, continue_without_parent, die_with_parent

_GRACE_S = 7.0
_PREDECESSOR_S = 2.0
"""How much longer than this zygote a predecessor may take to end its workers."""


def main() -> None:
    """Import what workers need, then fork on demand until the owner ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that hangs up does not end a run
    continue_without_parent()
    kills_at_once = sys.argv[1] == "1"
    owner = socket.socket(fileno=int(sys.argv[2]))
    predecessors = [int(text) for text in sys.argv[3].split(",") if text != "-"]
    from syncline.workers import entry  # the import that all workers share  # noqa: F401
    from syncline.workers.quick_start import without_compiler

    without_compiler()
    gc.freeze()  # workers need not search what they have inherited for garbage, nor copy its memory by doing so
    namespaces = [int(text) for text in sys.argv[4:]]
    Zygote(owner, namespaces, predecessors, kills_at_once=kills_at_once).serve()


class Zygote:
    """Forks workers and notifies the owner when one has ended."""

    def __init__(
        self,
        owner: socket.socket,
        namespaces: Sequence[int] = (),
        predecessors: Sequence[int] = (),
        *,
        kills_at_once: bool = False,
    ) -> None:
        self._owner, self._namespaces, self._predecessors = owner, namespaces, predecessors
        self._has_time = not kills_at_once
        self._is_retired = False
        self._folders: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(owner, selectors.EVENT_READ)
        self._workers: dict[int, tuple[int, int, int]] = {}  # pid -> (worker_id, life, pidfd)
        self._failed: set[int] = set()  # pids of failed workers of which the owner may not know yet
        self._received = b""

    def serve(self) -> None:
        """Run until the owner closes its end of the socket."""
        self._report({"is": "ready"})
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._owner:
                    self._reap(key.data)
                elif not self._handle_all():
                    since = time.monotonic()
                    self._end_workers()
                    self._end_predecessors(since)
                    for folder in self._folders:
                        shutil.rmtree(folder, ignore_errors=True)
                    return

    def _handle_all(self) -> bool:
        """Handle everything that the owner has sent. False if the owner has ended.

        All of it is read first: a zygote that was stopped for long finds launches that another one has carried out
        since, and behind them the order to retire.
        """
        is_over = not self._receive_all()
        *lines, self._received = self._received.split(b"\n")
        orders = [json.loads(line) for line in lines]
        self._is_retired = self._is_retired or any(order["do"] == "retire" for order in orders)
        for order in orders:
            if order["do"] != "launch":
                self._handle(order)
            elif not self._is_retired and not is_over:
                self._launch(order)
        return not is_over

    def _receive_all(self) -> bool:
        while True:
            try:
                data = self._owner.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._received += data

    def _launch(self, order: dict[str, Any]) -> None:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(order, zygote)
        descriptor = os.pidfd_open(pid)
        self._introduce(order["spec"], pid, descriptor)
        self._workers[pid] = (order["spec"]["worker_id"], order["spec"]["life"], descriptor)
        self._selector.register(descriptor, selectors.EVENT_READ, data=pid)

    def _handle(self, order: dict[str, Any]) -> None:
        if order["do"] == "kill":
            self._signal_all(signal.SIGKILL, order["worker_id"])
        elif order["do"] == "ping":
            self._report({"is": "pong"})
        elif order["do"] == "noted":
            self._failed.discard(order["pid"])
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
        if code != 0:
            self._failed.add(pid)
        report = {"is": "exit", "worker_id": worker_id, "life": life, "pid": pid, "code": None, "signal": None}
        report["code" if code >= 0 else "signal"] = abs(code)
        self._report(report)

    def _report(self, message: dict[str, Any]) -> None:
        try:
            self._owner.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # the owner has ended; `serve` will notice

    def _end_workers(self) -> None:
        """The owner has ended. Workers save and stop at their next step; those that do not are killed."""
        self._selector.unregister(self._owner)
        self._signal_all(signal.SIGTERM if self._has_time else signal.SIGKILL)
        deadline = time.monotonic() + _GRACE_S
        while self._workers:
            if self._failed:
                self._failed.clear()
                self._signal_all(PEER_FAILED)  # they would wait for it: no coordinator is left to notify them
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                self._reap(key.data)
            if not ready:
                self._signal_all(signal.SIGKILL)
                deadline = time.monotonic() + 1.0

    def _end_predecessors(self, since: float) -> None:
        """Wait until they have ended, as this one does, and kill those that do not; workers die with them."""
        deadline = since + (_GRACE_S + _PREDECESSOR_S if self._has_time else 0.0)
        for descriptor in self._predecessors:
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            if not end.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
                _signal(descriptor, signal.SIGKILL)

    def _signal_all(self, number: int, only: int | None = None) -> None:
        for worker_id, _, descriptor in self._workers.values():
            if only in (None, worker_id):
                _signal(descriptor, number)

    def _become_worker(self, order: dict[str, Any], zygote: int) -> NoReturn:
        code = 1
        try:
            die_with_parent()
            if os.getppid() != zygote:
                os._exit(code)  # it was killed before this process could ask to die with it
            own = os.pidfd_open(os.getpid())
            self._introduce(order["spec"], os.getpid(), own)
            os.close(own)
            self._owner.close()
            self._selector.close()
            for descriptor in (*(d for _, _, d in self._workers.values()), *self._predecessors):
                os.close(descriptor)
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

    def _introduce(self, spec: dict[str, Any], pid: int, descriptor: int) -> None:
        """Send the owner a pidfd of a worker, so that it can watch and kill it without the zygote.

        The zygote and the worker both do so: either may be stopped right after the fork.
        """
        message = {"is": "forked", "worker_id": spec["worker_id"], "life": spec["life"], "pid": pid}
        with contextlib.suppress(OSError):  # the owner has ended
            socket.send_fds(self._owner, [json.dumps(message).encode() + b"\n"], [descriptor])


def _signal(descriptor: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def _enter(namespace: int) -> None:
    """Move this thread, the only one so far, and all processes that it starts into this network namespace."""
    network = 0x40000000
    if ctypes.CDLL(None, use_errno=True).setns(namespace, network):
        number = ctypes.get_errno()
        raise OSError(number, f"Cannot enter the worker's network namespace: {os.strerror(number)}")


if __name__ == "__main__":
    main()
