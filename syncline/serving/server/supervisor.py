"""`Supervisor`: starts the server processes, replaces those that fail, and carries out changes in all of them.

It holds the listening sockets, one for each process on the same port (SO_REUSEPORT), so that connections which wait for
a killed process are accepted by its replacement. It has one thread and never loads a model: so it can fork, which takes
milliseconds. Not here: one process (`process.py`), the phases of a change (`rollout.py`), the files that are served
(`version_builder.py`), the metrics of all processes (`metrics_collector.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from syncline.errors import ConfigError, SynclineError
from syncline.serving.server.catalog import Catalog
from syncline.serving.server.control import (
    ChangeRequest,
    Done,
    Lines,
    Message,
    MetricsRequest,
    Port,
    Prepared,
    ProcessReady,
)
from syncline.serving.server.metrics_collector import MetricsCollector
from syncline.serving.server.process import ProcessSettings, run_process
from syncline.serving.server.rollout import Rollout
from syncline.serving.server.sources import ModelSource
from syncline.serving.server.version_builder import VersionBuilder
from syncline.serving.server.versions import rolled_back, unloaded

__all__ = ["Supervisor", "SupervisorSettings"]

_MOST_FAILED_STARTS = 5
_BACKLOG = 2048
_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """What to serve, and where."""

    sources: list[ModelSource]
    process: ProcessSettings
    host: str = "127.0.0.1"
    port: int = 0
    processes: int = 1
    follow: bool = False
    grpc_port: int | None = None
    say: Callable[[str], None] = lambda _: None
    """Reports what happens to the user."""


@dataclass
class _Child:
    number: int
    pid: int
    port: Port
    started_s: float
    is_ready: bool = False


class Supervisor:
    """Use it as a context: the processes run from its start to its end."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._reserved: list[socket.socket] = []
        self._listeners = _listeners(settings.host, settings.port, settings.processes)
        self.port: int = self._listeners[0].getsockname()[1]
        self.grpc_port: int | None = None
        self._process_settings = settings.process
        if settings.grpc_port is not None:
            self._reserve_grpc(settings.grpc_port)
        self._children: dict[int, _Child] = {}
        self._rollout = Rollout(Catalog(), self._send)
        self._metrics = MetricsCollector(lambda: self._rollout.ready, self._send)
        self._failed_starts = 0
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._versions = VersionBuilder(
            settings.sources, self._rollout, self._selector, settings.say, follows=settings.follow
        )

    def _reserve_grpc(self, port: int) -> None:
        """Keep a port that all processes can bind; gRPC opens its sockets itself."""
        try:
            self._reserved = _bound(self._settings.host, port, 1, shared=True)
        except ConfigError:
            self._close_listeners()
            raise
        host, self.grpc_port = self._settings.host, self._reserved[0].getsockname()[1]
        address = f"[{host}]:{self.grpc_port}" if ":" in host else f"{host}:{self.grpc_port}"
        self._process_settings = dataclasses.replace(self._settings.process, grpc_address=address)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT; `on_ready` is called once all processes answer."""
        try:
            with self._signals():
                import onnxruntime  # noqa: F401 - once, here, so that a replacement need not: it starts no thread

                self._versions.build_first(self._until)
                for number in range(self._settings.processes):
                    self._start(number)
                self._until(lambda: len(self._rollout.ready) == self._settings.processes)
                on_ready()
                self._until(lambda: False)
        finally:
            self._stop()

    def stop(self) -> None:
        """Make `run` return; from a signal handler."""
        self._is_stopping = True

    def when_closed(self, descriptor: int) -> None:
        """Stop when the other end of this pipe is closed: with the program that started us."""

        def look() -> None:
            if not os.read(descriptor, 4096):
                self._selector.unregister(descriptor)
                self.stop()

        self._selector.register(descriptor, selectors.EVENT_READ, look)

    # messages of the processes

    def _on_message(self, child: _Child) -> None:
        message = child.port.receive()
        if message is None:
            self._selector.unregister(child.port.socket)  # its end is noticed by waitpid
        elif isinstance(message, Prepared) and not child.is_ready:
            raise SynclineError(message.error or "", code="cannot-serve")  # the model cannot be loaded at all
        elif isinstance(message, ProcessReady | Prepared):
            if isinstance(message, ProcessReady) and not child.is_ready:
                child.is_ready, self._failed_starts = True, 0
            self._rollout.on_message(child.number, message)
        elif isinstance(message, ChangeRequest):
            self._change(child.number, message)
        elif isinstance(message, MetricsRequest):
            self._metrics.collect(child.number, message.number)
        elif isinstance(message, Lines):
            self._metrics.on_lines(child.number, message)

    def _change(self, asker: int, asked: ChangeRequest) -> None:
        def finished(error: str | None) -> None:
            self._send(asker, Done(asked.number, error))

        if asked.action == "roll-back":
            self._settings.say(f"Rolled back version {asked.version} of {asked.model}: {asked.reason}.")
            self._rollout.change(lambda c: rolled_back(c, asked.model, asked.version, asked.reason), lambda _: None)
        elif asked.action == "unload":
            self._rollout.change(lambda c: unloaded(c, asked.model, "unloaded"), finished)
        else:
            self._versions.reload(asked.model, finished)

    def _send(self, process: int, message: Message) -> None:
        child = self._children.get(process)
        if child is not None:
            child.port.send(message)

    # processes

    def _start(self, number: int) -> None:
        ours, theirs = Port.pair()
        catalog = self._rollout.catalog
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            self._be_child(number, theirs, ours, catalog)
        theirs.close()
        child = _Child(number, pid, ours, time.monotonic())
        self._children[number] = child
        self._selector.register(ours.socket, selectors.EVENT_READ, lambda: self._on_message(child))

    def _be_child(self, number: int, port: Port, other: Port, catalog: Catalog) -> None:
        """The child never returns: it is not the supervisor any more."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(signal_number, signal.SIG_DFL)
            self._close_inherited(number, other)
            run_process(number, self._listeners[number], port, catalog, self._process_settings)
            code = 0
        except KeyboardInterrupt:
            code = 0
        except SynclineError:
            pass  # reported to the supervisor
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _close_inherited(self, number: int, other: Port) -> None:
        """Close what belongs to the supervisor: the end of its sockets must mean the end of the supervisor."""
        other.close()
        self._selector.close()
        for child in self._children.values():
            child.port.close()
        for k, listener in enumerate(self._listeners):
            if k != number:
                listener.close()
        self._versions.forget()

    def _reap(self) -> None:
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid == 0:
                continue
            self._forget(child)
            if self._is_stopping:
                continue
            self._settings.say(f"Server process {child.number} ended ({_ended(status)}). Starting a replacement.")
            self._failed_starts += not child.is_ready
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise SynclineError(
                    f"The server processes end before they can serve ({_ended(status)}). The reason is above.",
                    code="server-failed", starts=self._failed_starts,
                )  # fmt: skip
            self._start(child.number)

    def _forget(self, child: _Child) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.port.socket)
        child.port.close()
        del self._children[child.number]
        self._rollout.on_gone(child.number)
        self._metrics.on_gone(child.number)

    # the loop

    def _until(self, is_done: Callable[[], bool]) -> None:
        while not self._is_stopping and not is_done():
            for key, _ in self._selector.select(_POLL_S):
                key.data()
            self._reap()
            self._metrics.answer()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals wake the loop up through a socket."""
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(4096))

        def on_stop(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.stop()

        before: dict[int, Any] = {n: signal.signal(n, on_stop) for n in (signal.SIGTERM, signal.SIGINT)}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        old = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            wake.close()
            woken.close()

    def _close_listeners(self) -> None:
        for listener in (*self._listeners, *self._reserved):
            listener.close()

    def _stop(self) -> None:
        """Close the door, and wait until the processes have answered what they have."""
        self._is_stopping = True
        self._close_listeners()
        for child in self._children.values():
            os.kill(child.pid, signal.SIGTERM)
        until = time.monotonic() + self._settings.process.limits.stop_s + 1
        while self._children and time.monotonic() < until:
            self._reap()
            time.sleep(0.005)
        for child in list(self._children.values()):
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            self._forget(child)
        self._versions.close()
        self._selector.close()


def _listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets that listen, one for each process; a second server on this port is refused."""
    found = _bound(host, port, count, shared=count > 1)
    for listener in found:
        listener.listen(_BACKLOG)
    return found


def _bound(host: str, port: int, count: int, *, shared: bool) -> list[socket.socket]:
    found: list[socket.socket] = []
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        for _ in range(count):
            one = socket.socket(family, kind)
            found.append(one)
            if shared:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            address = (address[0], one.getsockname()[1], *address[2:])
    except OSError as error:
        for one in found:
            one.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another port, or 0 for a free one.",
            code="port-taken", host=host, port=port,
        ) from error  # fmt: skip
    return found


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
