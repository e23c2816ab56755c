"""`Supervisor`: starts the server processes, replaces those that fail, and carries out changes in all of them.

It holds the listening sockets, one for each process on the same port (SO_REUSEPORT), so that connections which wait for
a killed process are accepted by its replacement. It has one thread and never loads a model: so it can fork, which takes
milliseconds. Not here: one process (`process.py`), the phases of a change (`rollout.py`), files made of runs
(`exporter.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from syncline.errors import ConfigError, SynclineError
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.control import (
    ChangeRequest,
    CollectMetrics,
    Done,
    Lines,
    Message,
    MetricsRequest,
    Port,
    Prepared,
    ProcessReady,
    Text,
)
from syncline.serving.server.exporter import Exported, Exporter, ExportFailed
from syncline.serving.server.metrics import merged
from syncline.serving.server.process import ProcessSettings, run_process
from syncline.serving.server.rollout import Rollout
from syncline.serving.server.sources import ModelSource, snapshot
from syncline.serving.server.versions import replaced, rolled_back, unloaded

__all__ = ["Supervisor", "SupervisorSettings"]

_MOST_FAILED_STARTS = 5
_COLLECT_S = 1.0
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


@dataclass
class _Scrape:
    """A request for metrics that waits for the processes."""

    asker: int
    number: int
    waiting: set[int]
    until_s: float
    lines: dict[int, list[str]] = field(default_factory=dict)


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
        self._scrapes: list[_Scrape] = []
        self._failed_starts = 0
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._folder = tempfile.TemporaryDirectory(prefix="syncline-serve-")
        self._copies = 0
        self._pending: list[str] = []
        self._files: set[str] = set()
        self._exporter: Exporter | None = None

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

                self._make_first()
                self._files = {version.path for version in self._rollout.catalog.versions}
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

    # what is served

    def _make_first(self) -> None:
        """The first catalog: all sources, or the first error."""
        made: dict[int, ServedVersion] = {}
        errors: list[str] = []
        for k, source in enumerate(self._settings.sources):
            self._make(source, lambda new, k=k: made.update({k: new}), errors.append)  # type: ignore[misc]
        self._until(lambda: len(made) == len(self._settings.sources) or bool(errors))
        if errors:
            raise SynclineError(errors[0], code="cannot-serve")
        catalog = self._rollout.catalog
        for _, new in sorted(made.items()):
            catalog = replaced(catalog, None, new, "")
        self._rollout.catalog = catalog
        if self._settings.follow:
            runs = [source.what for source in self._settings.sources if not source.is_file]
            self._exports().follow(runs, Path(self._folder.name))

    def _make(self, source: ModelSource, made: Callable[[ServedVersion], None], failed: Callable[[str], None]) -> None:
        """A version with a file that never changes: a copy, or the export of a run."""
        self._copies += 1
        folder = Path(self._folder.name) / f"copy-{self._copies}"
        try:
            if source.is_file:
                made(_served(source, snapshot(Path(source.what), folder), None))
                return

            def answered(answer: Exported | ExportFailed) -> None:
                if isinstance(answer, ExportFailed):
                    failed(answer.reason)
                else:
                    if answer.note:
                        self._settings.say(answer.note)
                    made(_served(source, Path(answer.path), answer.step))

            self._exports().ask(source.what, folder, answered)
        except SynclineError as error:
            failed(str(error))

    def _exports(self) -> Exporter:
        if self._exporter is None:
            self._exporter = Exporter(self._on_followed)
            self._selector.register(self._exporter.output, selectors.EVENT_READ, self._on_exports)
        return self._exporter

    def _on_exports(self) -> None:
        assert self._exporter is not None
        if not self._exporter.receive():
            self._selector.unregister(self._exporter.output)
            self._exporter.close()
            self._exporter = None
            if self._settings.follow:
                self._settings.say("The process that exports runs has ended: new checkpoints are not served.")

    def _on_followed(self, answer: Exported | ExportFailed) -> None:
        """The exporter has made a file of a newer checkpoint."""
        if isinstance(answer, ExportFailed):
            self._settings.say(f"The newest checkpoint of {answer.what} is not served: {answer.reason}")
            return

        def finished(error: str | None) -> None:
            shown = f"step {answer.step} of {answer.what}"
            self._settings.say(f"Serving {shown}." if error is None else f"Not serving {shown}: {error}")

        for source in self._settings.sources:
            if source.what == answer.what:
                self._put(source, _served(source, Path(answer.path), answer.step), finished)

    def _put(self, source: ModelSource, new: ServedVersion, finished: Callable[[str | None], None]) -> None:
        """Serve `new` in place of the version that the same source has made before."""
        self._pending.append(new.path)

        def edit(catalog: Catalog) -> Catalog:
            same = (source.model, source.what, source.role)
            old = next((v for v in catalog.versions if (v.model, v.source, v.role) == same), None)
            return replaced(catalog, old, new, "replaced by a newer version")

        def done(error: str | None) -> None:
            self._pending.remove(new.path)
            self._remove_copies(new.path)
            finished(error)

        self._rollout.change(edit, done)

    def _remove_copies(self, made: str) -> None:
        """Remove the files that no version is made of any more."""
        self._files.add(made)
        used = {version.path for version in self._rollout.catalog.versions}
        for path in self._files - used - set(self._pending):
            self._files.discard(path)
            shutil.rmtree(Path(path).parent, ignore_errors=True)

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
            self._collect(child.number, message.number)
        elif isinstance(message, Lines):
            self._collected(child.number, message)

    def _change(self, asker: int, asked: ChangeRequest) -> None:
        def finished(error: str | None) -> None:
            self._send(asker, Done(asked.number, error))

        if asked.action == "roll-back":
            self._settings.say(f"Rolled back version {asked.version} of {asked.model}: {asked.reason}.")
            self._rollout.change(lambda c: rolled_back(c, asked.model, asked.version, asked.reason), lambda _: None)
        elif asked.action == "unload":
            self._rollout.change(lambda c: unloaded(c, asked.model, "unloaded"), finished)
        else:
            self._reload(asked.model, finished)

    def _reload(self, model: str, finished: Callable[[str | None], None]) -> None:
        """Read all sources of a model again."""
        sources = [source for source in self._settings.sources if source.model == model]
        errors: list[str] = []
        left = len(sources)

        def one_is_done(error: str | None) -> None:
            nonlocal left
            left -= 1
            errors.extend(filter(None, [error]))
            if not left:
                finished(" ".join(errors) or None)

        for source in sources:
            self._make(source, lambda new, source=source: self._put(source, new, one_is_done), one_is_done)  # type: ignore[misc]

    def _collect(self, asker: int, number: int) -> None:
        ready = set(self._rollout.ready)
        self._scrapes.append(_Scrape(asker, number, ready, time.monotonic() + _COLLECT_S))
        for process in ready:
            self._send(process, CollectMetrics(number))

    def _collected(self, process: int, message: Lines) -> None:
        for scrape in self._scrapes:
            if scrape.number == message.number and process in scrape.waiting:
                scrape.waiting.discard(process)
                scrape.lines[process] = message.lines
                break
        self._answer_scrapes()

    def _answer_scrapes(self) -> None:
        now = time.monotonic()
        for scrape in [s for s in self._scrapes if not s.waiting or s.until_s < now]:
            self._scrapes.remove(scrape)
            self._send(scrape.asker, Text(scrape.number, merged(scrape.lines.values())))

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
            pass  # told to the supervisor
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
        if self._exporter is not None:
            self._exporter.forget()

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
        for scrape in self._scrapes:
            scrape.waiting.discard(child.number)

    # the loop

    def _until(self, is_done: Callable[[], bool]) -> None:
        while not self._is_stopping and not is_done():
            for key, _ in self._selector.select(_POLL_S):
                key.data()
            self._reap()
            self._answer_scrapes()

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
        if self._exporter is not None:
            self._exporter.close()
        self._selector.close()
        self._folder.cleanup()


def _served(source: ModelSource, path: Path, step: int | None) -> ServedVersion:
    return ServedVersion(
        model=source.model, version="0", path=str(path), role=source.role, share=source.share, source=source.what,
        step=step,
    )  # fmt: skip


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
