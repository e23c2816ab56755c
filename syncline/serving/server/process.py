"""One server process: sockets, the event loop, and the supervisor's orders.

Here: from fork to exit. SIGTERM ends it after the requests in flight. If the supervisor is gone, it does the same. Not
here: the other processes (`supervisor.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from syncline.serving.server.access import Access
from syncline.serving.server.access_log import AccessLog
from syncline.serving.server.app import App, Manager
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.control import (
    Apply,
    ChangeRequest,
    CollectMetrics,
    Done,
    Lines,
    Message,
    MetricsRequest,
    Port,
    Prepare,
    Prepared,
    ProcessReady,
    Text,
)
from syncline.serving.server.http import HttpServer
from syncline.serving.server.limits import Limits
from syncline.serving.server.loading import Loader
from syncline.serving.server.metrics import ServerMetrics
from syncline.serving.server.registry import LoadedVersion, Registry

__all__ = ["ProcessSettings", "run_process"]

_SWEEP_S = 0.5
_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """What every server process of one server has in common."""

    limits: Limits
    token: str | None
    cores: int
    """Cores for one process: the most threads that a model gets."""
    max_batch: int
    tls: tuple[str, str] | None = None
    """Files with the certificate and its key."""
    log_descriptor: int | None = None
    grpc_address: str | None = None


def run_process(number: int, listener: socket.socket, port: Port, catalog: Catalog, settings: ProcessSettings) -> None:
    """Serve until SIGTERM, or until the supervisor is gone."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(number, listener, port, catalog, settings))


async def _serve(number: int, listener: socket.socket, port: Port, catalog: Catalog, settings: ProcessSettings) -> None:
    await _ServerProcess(number, port, settings).serve(listener, catalog)


class _ServerProcess:
    """The parts of one process, on its event loop."""

    def __init__(self, number: int, port: Port, settings: ProcessSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._port, self._settings, self._limits = port, settings, settings.limits
        self._orders = _Orders(port)
        metrics = ServerMetrics(number)
        self._registry = Registry(metrics, self._orders.roll_back)
        self._app = App(self._registry, metrics, Access(settings.token), self._limits, self._orders)
        self._http = HttpServer(self._app, AccessLog(settings.log_descriptor, number), self._loop)
        self._loader = Loader(
            self._loop, cores=settings.cores, max_batch=settings.max_batch, wait_s=self._limits.wait_s
        )
        self._loaded: dict[tuple[str, str], LoadedVersion] = {}
        self._stopping = asyncio.Event()
        self._messages: asyncio.Queue[Prepare | Apply] = asyncio.Queue()

    async def serve(self, listener: socket.socket, catalog: Catalog) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stopping.set)
        self._port.socket.setblocking(False)
        self._loop.add_reader(self._port.socket.fileno(), self._on_message)
        try:
            await self._apply(catalog)
        except Exception as problem:
            self._port.send(Prepared(catalog.generation, str(problem)))
            raise
        server = await self._loop.create_server(
            self._http.connect, sock=listener, backlog=_BACKLOG, ssl=_tls(self._settings.tls)
        )
        grpc_server = await self._start_grpc()
        self._port.send(ProcessReady(catalog.generation))
        chores = [asyncio.create_task(self._sweep()), asyncio.create_task(self._follow_orders())]
        await self._stopping.wait()
        await self._stop(server, grpc_server)
        for chore in chores:
            chore.cancel()
        self._loader.close()

    async def _stop(self, server: asyncio.Server, grpc_server: Any) -> None:
        """Accept no more, and wait for the requests in flight."""
        await asyncio.sleep(0)  # connections that are already there are accepted
        server.close()
        self._http.stop()
        if grpc_server is not None:
            await grpc_server.stop(self._limits.stop_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.stop_s):
                while self._http.connections:
                    await asyncio.sleep(0.01)
        self._http.sweep()

    async def _start_grpc(self) -> Any:
        if self._settings.grpc_address is None:
            return None
        from syncline.serving.server.grpc_service import start_grpc

        return await start_grpc(self._app, self._settings.grpc_address, self._settings.tls)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._http.sweep()

    def _on_message(self) -> None:
        message = self._port.receive()
        if message is None:
            self._loop.remove_reader(self._port.socket.fileno())
            self._stopping.set()
        elif isinstance(message, Prepare | Apply):
            self._messages.put_nowait(message)
        elif isinstance(message, CollectMetrics):
            self._port.send(Lines(message.number, self._app.metric_lines()))
        else:
            self._orders.on_answer(message)

    async def _follow_orders(self) -> None:
        """One after the other, in the order in which they came."""
        while True:
            order = await self._messages.get()
            generation, error = order.catalog.generation, None
            try:
                await (self._prepare(order.catalog) if isinstance(order, Prepare) else self._apply(order.catalog))
            except Exception as problem:  # a broken model must not stop those that are served
                error = str(problem)
            if isinstance(order, Apply) and error is None:
                self._port.send(ProcessReady(generation))
            else:
                self._port.send(Prepared(generation, error))

    async def _prepare(self, catalog: Catalog) -> None:
        self._loaded = await self._loader.load(catalog, {**self._registry.loaded(), **self._loaded})

    async def _apply(self, catalog: Catalog) -> None:
        await self._prepare(catalog)
        self._registry.apply(catalog, self._loaded)
        self._loaded = {}


class _Orders(Manager):
    """Asks the supervisor for what concerns all processes, and passes its answers on."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callable[[Any], None]] = {}

    def load(self, model: str, done: Callable[[str | None], None]) -> None:
        self._ask("load", model, done)

    def unload(self, model: str, done: Callable[[str | None], None]) -> None:
        self._ask("unload", model, done)

    def metrics(self, own: list[str], done: Callable[[str], None]) -> None:
        del own
        number = next(self._numbers)
        self._waiting[number] = done
        self._port.send(MetricsRequest(number))

    def roll_back(self, served: ServedVersion, reason: str) -> None:
        self._port.send(ChangeRequest(0, "roll-back", served.model, served.version, reason))

    def on_answer(self, message: Message) -> None:
        if isinstance(message, Done | Text) and (done := self._waiting.pop(message.number, None)) is not None:
            done(message.error if isinstance(message, Done) else message.text)

    def _ask(self, action: str, model: str, done: Callable[[str | None], None]) -> None:
        number = next(self._numbers)
        self._waiting[number] = done
        self._port.send(ChangeRequest(number, action, model))


def _tls(files: tuple[str, str] | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*files)
    return context
