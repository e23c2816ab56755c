"""One zygote, as its owner sees it.

Here: `ZygoteProcess`: its end of the socket, and the workers that it has forked. The owner holds a pidfd of each
worker, sent by the zygote and by the worker itself when it begins. So the owner can kill workers, and see them end,
without the zygote. It also kills those that are stopped. Not here: the zygote's own program (`zygote.py`), when it
counts as stuck (`zygote_monitor.py`), and what follows (`local.py`).
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from syncline.compute.processes import process_state, zombie_status
from syncline.engines.engine import Exit
from syncline.engines.zygote_monitor import StoppedTime, ZygoteMonitor

Key = tuple[int, int]
"""(worker_id, life)"""

_REPORT_S = 0.3
"""How long a zygote may take to report the end of a worker. Then its owner finds out by itself."""
_WORKER_STOPPED_S = 1.5
"""How long a worker may be stopped. Missing heartbeats are noticed earlier, but only if there was a first one, and not
if the heartbeats of this run have long gaps."""
_DIE_WITH_IT_S = 2.0
"""How long the kernel may take to end the workers of a zygote that was killed."""
_STATE_EVERY_S = 0.25
_MOST_DESCRIPTORS = 16
_ENVIRONMENT = {
    # Workers set their number of threads themselves; a zygote with threads could not be forked.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # A local run uses loopback only, unless the worker is given another address (`comms/process_group.py`).
    "GLOO_SOCKET_IFNAME": "lo",
}


class Started(Protocol):
    """The part of `subprocess.Popen` that is used."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


@dataclass
class _Forked:
    pid: int
    descriptor: int
    ended_at: float | None = None
    stopped: StoppedTime = field(default_factory=StoppedTime)
    why_killed: str = ""


@dataclass
class Launch:
    """A launch that was ordered; `is_killed`: so was the end of that worker."""

    order: dict[str, Any]
    is_killed: bool = False


def zygote_arguments(
    kills_at_once: bool, connection: int, predecessors: Sequence[int], namespaces: Sequence[int]
) -> list[str]:
    """The command line of a zygote."""
    inherited = ",".join(map(str, predecessors)) or "-"
    options = (int(kills_at_once), connection, inherited, *namespaces)
    return [sys.executable, "-m", "syncline.engines.zygote", *map(str, options)]


def zygote_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a zygote, which must find this very package, wherever it was imported from."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, **_ENVIRONMENT, **extra, "PYTHONPATH": path}


class ZygoteProcess:
    """A zygote at the other end of `connection`; `ready` gets the descriptors that become readable when it reports."""

    def __init__(
        self, process: Started, connection: socket.socket, ready: select.epoll, *, patience: float = 1.0
    ) -> None:
        self.process, self._socket, self._ready = process, connection, ready
        self.descriptor = os.pidfd_open(process.pid)
        """Its pidfd."""
        self.launches: dict[Key, Launch] = {}
        """What was ordered and has not happened yet."""
        self._workers: dict[Key, _Forked] = {}
        self._monitor = ZygoteMonitor(time.monotonic(), patience=patience)
        self._state, self._state_at, self._states_at = "", 0.0, 0.0
        self._received, self._unsent = b"", b""
        self._descriptors: list[int] = []  # that arrived, but not yet the lines they belong to
        self.has_ended = False
        """Whether it has closed its end of the socket, which it does by ending only."""
        self.has_forked = False
        """Whether it has ever carried out a launch."""
        connection.setblocking(False)
        ready.register(connection, select.EPOLLIN)

    @property
    def has_workers(self) -> bool:
        return bool(self._workers)

    def send(self, order: dict[str, Any]) -> None:
        """Send an order. Never waits: the zygote may be stopped. If it has ended, the next `poll` notices."""
        self._unsent += json.dumps(order).encode() + b"\n"
        self._flush()

    def launch(self, key: Key, launch: Launch) -> None:
        self.launches[key] = launch
        self.send(launch.order)

    def kill(self, worker_id: int | None) -> None:
        """Kill all workers, or those with this id, also if they are yet to be forked."""
        for (number, _), worker in self._workers.items():
            if worker_id in (None, number):
                _signal(worker.descriptor, signal.SIGKILL)
        waiting = [launch for (number, _), launch in self.launches.items() if worker_id in (None, number)]
        for launch in waiting:
            launch.is_killed = True
        if waiting:
            self.send({"do": "kill", "worker_id": worker_id})

    def poll(self, now: float, ended: set[int]) -> list[Exit]:
        """The workers that have ended; `ended` has the pidfds of those that the kernel has reported."""
        for worker in self._workers.values():
            if worker.descriptor in ended:
                worker.ended_at = now
                self._ready.unregister(worker.descriptor)  # it stays readable
        exits = self._receive(now)
        for key, worker in list(self._workers.items()):
            if worker.ended_at is not None and (self.has_ended or now - worker.ended_at > _REPORT_S):
                exits.append(self._found_ended(key, worker))
        self._kill_stopped(now)
        self._flush()
        return exits

    def why_stuck(self, now: float) -> str | None:
        """Ping it if that is due; why it counts as stuck, if it does."""
        if self._monitor.wants_ping(now):
            self.send({"do": "ping"})
        if now - self._state_at >= _STATE_EVERY_S:
            self._state, self._state_at = process_state(self.process.pid), now
        return self._monitor.why_stuck(now, self._state)

    def retire(self) -> dict[Key, Launch]:
        """Have it fork no more; returns the launches that it has not carried out."""
        launches, self.launches = self.launches, {}
        self.send({"do": "retire"})
        return launches

    def end(self) -> None:
        """Announce the owner's end: the zygote ends its workers and itself. `wait` for that."""
        self.send({"do": "end"})
        self._socket.close()  # the epoll forgets it
        _signal(self.descriptor, signal.SIGCONT)  # a stopped one, too

    def wait(self, timeout_s: float) -> int:
        """Wait for its end, and end it after `timeout_s`; its workers die with it. Returns its exit code."""
        if not _ends_within(self.descriptor, timeout_s):
            self.process.kill()
        code = self.process.wait()
        for worker in self._workers.values():
            _ends_within(worker.descriptor, _DIE_WITH_IT_S)
        self._socket.close()
        for descriptor in (self.descriptor, *(w.descriptor for w in self._workers.values()), *self._descriptors):
            os.close(descriptor)
        self._workers.clear()
        return code

    def _kill_stopped(self, now: float) -> None:
        if now - self._states_at < _STATE_EVERY_S:
            return
        self._states_at = now
        for worker in self._workers.values():
            stopped_s = worker.stopped.update(now, process_state(worker.pid))
            if stopped_s >= _WORKER_STOPPED_S and not worker.why_killed:
                worker.why_killed = f"was stopped, as by SIGSTOP, for {stopped_s:.1f} s and was killed"
                _signal(worker.descriptor, signal.SIGKILL)

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return  # `poll` tries again
        except OSError:
            self._unsent = b""  # it has ended, which `_receive` notices

    def _receive(self, now: float) -> list[Exit]:
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        exits: list[Exit] = []
        while not self.has_ended:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(65536, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                break
            except OSError:
                data, ancillary = b"", []
            for level, kind, sent in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors += array.array("i", sent)
            if not data:
                self.has_ended = True
                self._ready.unregister(self._socket)  # it stays readable
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                exits += self._handle(json.loads(line), now)
        return exits

    def _handle(self, message: dict[str, Any], now: float) -> list[Exit]:
        what = message.pop("is")
        if what == "ready":
            self._monitor.on_ready(now)
        elif what == "pong":
            self._monitor.on_answer(now)
        elif what == "forked":
            self._add_worker((message["worker_id"], message["life"]), message["pid"], self._descriptors.pop(0))
        elif what == "exit":
            return self._on_report(Exit(**message))
        return []

    def _add_worker(self, key: Key, pid: int, descriptor: int) -> None:
        known = self._workers.get(key)
        if known is not None and known.pid == pid:  # sent by the zygote and by the worker
            os.close(descriptor)
            return
        if self.launches.pop(key, None) is None:
            # It was stopped, and another zygote has carried out the launch by now.
            _signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
            return
        self.has_forked = True
        self._workers[key] = _Forked(pid, descriptor)
        self._ready.register(descriptor, select.EPOLLIN)

    def _on_report(self, exit: Exit) -> list[Exit]:
        self._note(exit.pid)
        key = exit.worker_id, exit.life
        worker = self._workers.get(key)
        if worker is None:
            # Killed before it could report itself; or known already.
            return [exit] if self.launches.pop(key, None) is not None else []
        self._remove(key, worker)
        return [replace(exit, signal=None, reason=worker.why_killed) if worker.why_killed else exit]

    def _found_ended(self, key: Key, worker: _Forked) -> Exit:
        """The end of a worker that the zygote does not report."""
        status = zombie_status(worker.pid)
        self._remove(key, worker)
        self._note(worker.pid)
        reason = worker.why_killed
        if not reason and self.has_ended and status in (None, -signal.SIGKILL):
            reason = "was killed with the process that starts workers"
        if not reason and status is None:
            reason = "ended, and the process that started it does not report how"
        if reason or status is None:
            return Exit(key[0], worker.pid, None, None, key[1], reason)
        code, number = (status, None) if status >= 0 else (None, -status)
        return Exit(key[0], worker.pid, code, number, key[1])

    def _remove(self, key: Key, worker: _Forked) -> None:
        del self._workers[key]
        if worker.ended_at is None:
            self._ready.unregister(worker.descriptor)
        os.close(worker.descriptor)

    def _note(self, pid: int) -> None:
        """The owner knows of this end, and will act on it."""
        self.send({"do": "noted", "pid": pid})


def _ends_within(descriptor: int, timeout_s: float) -> bool:
    end = select.poll()
    end.register(descriptor, select.POLLIN)
    return bool(end.poll(int(timeout_s * 1000)))


def _signal(descriptor: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)
