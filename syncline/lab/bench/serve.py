"""The server against ONNX Runtime alone, and against other servers: CPU time per request, and requests per second.

Here: LeNet, one image per request, 8 connections. Only the CPU time of the server counts, not that of the client; a
busy machine disturbs it less than a rate. Not here: starting other servers (`server_peers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import uvloop

from syncline.errors import SynclineError
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.server_peers import cpu_s, found_servers, started
from syncline.serving.exporting.onnx_file import export_onnx
from syncline.serving.metadata import open_session
from syncline.serving.serve import ModelServer
from syncline.serving.server.options import ServeOptions

_MODEL = "lenet"
_CONNECTIONS = 8
_LIMIT_S = 120.0
_TIMES_OURS = {"mlserver": 3, "triton": 3, "litserve": 8, "bentoml": 8}
"""How many times as much CPU time as ours each server is expected to take for the same JSON."""
_AS_STARTED = "json, batched"
"""Ours as users start it; the others are, too."""
_IMAGE = np.random.default_rng(0).integers(0, 256, (1, 1, 28, 28), np.uint8)


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """CPU time per request, then the rate with one and two processes."""
    count = 400 if settings.quick else 3000
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        settings.say(f"Exporting {_MODEL}.")
        path = Path(folder) / f"{_MODEL}.onnx"
        export_onnx(_MODEL, path)
        with _served(path, max_batch=1) as alone, _served(path) as batched:
            _pin(alone, batched)
            with contextlib.ExitStack() as others:
                peers, missing = _peers(settings, path, others, count)
                yield _cpu_suite(path, alone, batched, count, peers, missing)
        with _served(path) as one, _served(path, processes=2) as two:
            yield _rate_suite(one, two, count)


def _peers(
    settings: BenchSettings, model: Path, opened: contextlib.ExitStack, count: int
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The other servers that run here, by their key, and why the others do not, by name."""
    found, missing = found_servers(settings.peers_dir)
    running: dict[str, Contender] = {}
    for peer, python in found:
        settings.say(f"Starting {peer.name}.")
        try:
            server = opened.enter_context(started(peer, python, model, _json_body(), min(os.sched_getaffinity(0))))
        except SynclineError as error:
            settings.say(str(error))
            missing[peer.name] = "does not start; the reason is above"
            continue
        request = _post(_json_body(), "Content-Type: application/json\r\n", server.path)
        measure = partial(_cpu_us, server.port, server.pids, request, count)
        running[peer.key] = Contender(name=peer.name, measure=measure, what=peer.what)
    return running, missing


def _cpu_suite(
    path: Path,
    alone: ModelServer,
    batched: ModelServer,
    count: int,
    peers: dict[str, Contender],
    missing: dict[str, str],
) -> Suite:
    def contender(name: str, server: ModelServer, request: bytes, what: str) -> Contender:
        return Contender(name=name, measure=partial(_cpu_us, server.port, server.pids, request, count), what=what)

    return Suite(
        name="serve-cpu",
        measures=f"CPU microseconds of the server per request: {_MODEL}, one image per request, {_CONNECTIONS} "
        f"connections, {count:,} requests, one core.",
        unit="us/request",
        baseline="onnxruntime",
        contenders=(
            Contender(name="onnxruntime", measure=_runtime_us(path, count), what="session.run, without a server."),
            contender("binary", alone, binary_request(), "Binary tensors with --max-batch 1."),
            contender("json", alone, json_request(), "JSON with --max-batch 1."),
            contender("binary, batched", batched, binary_request(), "Binary tensors; queued requests run together."),
            contender(_AS_STARTED, batched, json_request(), "JSON; queued requests run together."),
            contender("ping", alone, b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", "No inference."),
            *peers.values(),
        ),
        # 40 and 90 microseconds on top of the 115 that LeNet takes. Only for requests that run alone, as the baseline
        # does: in a batch ONNX Runtime itself takes less per image, which would hide a part of the server's cost.
        goals=(
            Goal(contender="binary", limit=1.35),
            Goal(contender="json", limit=1.8),
            *[
                Goal(contender=peers[key].name, limit=times, bound="at least", against=_AS_STARTED)
                for key, times in _TIMES_OURS.items()
                if key in peers
            ],
        ),
        missing=missing,
    )


def _rate_suite(one: ModelServer, two: ModelServer, count: int) -> Suite:
    return Suite(
        name="serve-rate",
        measures=f"Requests per second with binary tensors: {_MODEL}, one image per request, {_CONNECTIONS} "
        "connections. The client takes a part of the same cores.",
        unit="requests/s",
        baseline="1 process",
        contenders=(
            Contender(name="1 process", measure=partial(_rate, one, count)),
            Contender(name="2 processes", measure=partial(_rate, two, count)),
        ),
    )


def binary_request() -> bytes:
    tensor = {"name": "input", "shape": _IMAGE.shape, "datatype": "UINT8",
              "parameters": {"binary_data_size": _IMAGE.nbytes}}  # fmt: skip
    output = {"name": "logits", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    return _post(head + _IMAGE.tobytes(), f"Inference-Header-Content-Length: {len(head)}\r\n")


def json_request() -> bytes:
    return _post(_json_body(), "")


def _json_body() -> bytes:
    tensor = {"name": "input", "shape": _IMAGE.shape, "datatype": "UINT8", "data": _IMAGE.ravel().tolist()}
    return json.dumps({"inputs": [tensor], "outputs": [{"name": "logits"}]}).encode()


def _post(body: bytes, headers: str, path: str = f"/v2/models/{_MODEL}/infer") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def _served(path: Path, *, max_batch: int = 8, processes: int = 1) -> Iterator[ModelServer]:
    options = ServeOptions(what=(str(path),), name=_MODEL, max_batch=max_batch, processes=processes)
    server = ModelServer(options)
    try:
        yield server
    finally:
        server.close()


def _pin(*servers: ModelServer) -> None:
    core = min(os.sched_getaffinity(0))
    for pid in (pid for server in servers for pid in server.pids()):
        os.sched_setaffinity(pid, {core})


def _runtime_us(path: Path, count: int) -> Callable[[], float]:
    session = open_session(path, threads=1)

    def measure() -> float:
        start = time.process_time()
        for _ in range(count):
            session.run(["logits"], {"input": _IMAGE})
        return 1e6 * (time.process_time() - start) / count

    return measure


def _cpu_us(port: int, pids: Callable[[], list[int]], request: bytes, count: int) -> float:
    _load(port, request, count // 10)
    before = cpu_s(pids())
    _load(port, request, count)
    return 1e6 * (cpu_s(pids()) - before) / count


def _rate(server: ModelServer, count: int) -> float:
    return count / _load(server.port, binary_request(), count)


def _load(port: int, request: bytes, count: int) -> float:
    """Send this many requests over some connections; returns the seconds."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(_send_all(port, request, count), _LIMIT_S))


async def _send_all(port: int, request: bytes, count: int) -> float:
    loop = asyncio.get_running_loop()
    clients = [_Client(request, count // _CONNECTIONS, loop.create_future()) for _ in range(_CONNECTIONS)]
    start = time.perf_counter()
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*[client.done for client in clients])
    return time.perf_counter() - start


class _Client(asyncio.Protocol):
    """Sends a request, waits for the response, and so on."""

    def __init__(self, request: bytes, count: int, done: asyncio.Future[None]) -> None:
        self._request, self._left, self.done = request, count, done
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("The server closed the connection."))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(ValueError(self._received.decode(errors="replace")))
            return
        self._received, self._left = b"", self._left - 1
        if self._left > 0:
            self._transport.write(self._request)
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()
