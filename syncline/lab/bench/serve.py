"""The server against ONNX Runtime alone, and against other servers: CPU time per request, and requests per second.

Here: LeNet, one image per request, 8 connections. Only the CPU time of the server counts, not that of the client; a
busy machine disturbs it less than a rate. Not here: the server and its requests (`served_lenet.py`), overload and slow
clients (`serve_load.py`), starting other servers (`server_peers.py`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

from syncline.errors import SynclineError
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.load import LoadClient
from syncline.lab.bench.served_lenet import (
    MODEL,
    PING,
    binary_request,
    images,
    json_body,
    json_request,
    model_file,
    pin,
    post,
    served,
)
from syncline.lab.bench.server_peers import cpu_s, found_servers, started
from syncline.serving.metadata import open_session
from syncline.serving.serve import ModelServer

_CONNECTIONS = 8
_TIMES_OURS = {"mlserver": 3, "triton": 3, "litserve": 8, "bentoml": 8}
"""How many times as much CPU time as ours each server is expected to take for the same JSON."""
_AS_STARTED = "json, batched"
"""Ours as users start it; the others are, too."""
_IMAGES_FOR_RATE = 8
"""Images per request of the rate: the server then takes about 20 times the CPU of the client on the same cores. With
more, the connections would wait for each other so long that the server refused some."""


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """CPU time per request, then the rate with one and two processes."""
    count = 400 if settings.quick else 3000
    settings.say(f"Exporting {MODEL}.")
    with model_file() as path:
        with served(path, max_batch=1) as alone, served(path) as batched:
            pin(alone, batched)
            with contextlib.ExitStack() as others:
                peers, missing = _peers(settings, path, others, count)
                yield _cpu_suite(path, alone, batched, count, peers, missing)
        with served(path) as one, served(path, processes=2) as two, _runtimes(path) as runtimes:
            yield _rate_suite(one, two, runtimes, count)


def _peers(
    settings: BenchSettings, model: Path, opened: contextlib.ExitStack, count: int
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The other servers that run here, by their key, and why the others do not, by name."""
    found, missing = found_servers(settings.peers_dir)
    running: dict[str, Contender] = {}
    for peer, python in found:
        settings.say(f"Starting {peer.name}.")
        try:
            server = opened.enter_context(started(peer, python, model, json_body(), min(os.sched_getaffinity(0))))
        except SynclineError as error:
            settings.say(str(error))
            missing[peer.name] = "does not start; the reason is above"
            continue
        request = post(json_body(), "Content-Type: application/json\r\n", server.path)
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
        measures=f"CPU microseconds of the server per request: {MODEL}, one image per request, {_CONNECTIONS} "
        f"connections, {count:,} requests, one core.",
        unit="us/request",
        baseline="onnxruntime",
        contenders=(
            Contender(name="onnxruntime", measure=_runtime_us(path, count), what="session.run, without a server."),
            contender("binary", alone, binary_request(), "Binary tensors with --max-batch 1."),
            contender("json", alone, json_request(), "JSON with --max-batch 1."),
            contender("binary, batched", batched, binary_request(), "Binary tensors; queued requests run together."),
            contender(_AS_STARTED, batched, json_request(), "JSON; queued requests run together."),
            contender("ping", alone, PING, "No inference."),
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


def _rate_suite(one: ModelServer, two: ModelServer, runtimes: Runtimes, count: int) -> Suite:
    measure = partial(_rate, binary_request(_IMAGES_FOR_RATE), count // 2)
    runs = count // 2
    return Suite(
        name="serve-rate",
        measures=f"Requests per second with binary tensors: {MODEL}, {_IMAGES_FOR_RATE} images per request, "
        f"{_CONNECTIONS} connections. The client takes a part of the same cores.",
        unit="requests/s",
        baseline="1 process",
        contenders=(
            Contender(name="1 process", measure=partial(measure, one)),
            Contender(name="2 processes", measure=partial(measure, two)),
            Contender(
                name="onnxruntime in 1", measure=partial(runtimes.rate, 1, runs),
                what="session.run in one process, without a server.",
            ),
            Contender(
                name="onnxruntime in 2", measure=partial(runtimes.rate, 2, runs),
                what="The same in two processes at once: what the two cores give.",
            ),
        ),
        goals=(Goal(contender="2 processes", limit=1.8, bound="at least"),),
    )  # fmt: skip


def _runtime_us(path: Path, count: int) -> Callable[[], float]:
    session, image = open_session(path, threads=1), images()

    def measure() -> float:
        start = time.process_time()
        for _ in range(count):
            session.run(["logits"], {"input": image})
        return 1e6 * (time.process_time() - start) / count

    return measure


def _cpu_us(port: int, pids: Callable[[], list[int]], request: bytes, count: int) -> float:
    with LoadClient(port, request, _CONNECTIONS) as client:
        client.ask_all(count // 10)
        before = cpu_s(pids())
        client.ask_all(count)
        return 1e6 * (cpu_s(pids()) - before) / count


def _rate(request: bytes, count: int, server: ModelServer) -> float:
    with LoadClient(server.port, request, _CONNECTIONS) as client:
        client.ask_all(count // 10)
        return count / client.ask_all(count).took_s


class Runtimes:
    """Processes that run the model without a server."""

    def __init__(self, path: Path, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = [context.Pipe() for _ in range(processes)]
        self._processes = [
            context.Process(target=_run_model, args=(theirs, path), daemon=True) for _, theirs in self._pool
        ]
        for process in self._processes:
            process.start()

    def rate(self, processes: int, count: int) -> float:
        """Runs per second of so many of them at once."""
        ours = [pipe for pipe, _ in self._pool[:processes]]
        for pipe in ours:
            pipe.send(count)
        return sum(float(pipe.recv()) for pipe in ours)

    def close(self) -> None:
        for pipe, _ in self._pool:
            pipe.send(0)
        for process in self._processes:
            process.join()


@contextlib.contextmanager
def _runtimes(path: Path) -> Generator[Runtimes, None, None]:
    found = Runtimes(path, 2)
    try:
        yield found
    finally:
        found.close()


def _run_model(pipe: Any, path: Path) -> None:
    session, given = open_session(path, threads=1), images(_IMAGES_FOR_RATE)
    while count := pipe.recv():
        start = time.perf_counter()
        for _ in range(count):
            session.run(["logits"], {"input": given})
        pipe.send(count / (time.perf_counter() - start))
