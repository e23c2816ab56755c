"""The server under more load than it can take, and beside clients that are slow on purpose: 99th percentiles.

Here: the server on one core, the client on another one. Overload is that of a model that takes some milliseconds, slow
clients disturb LeNet. Not here: the cost of a request (`serve.py`), and the client that measures (`load.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.load import Answers, LoadClient, percentile
from syncline.lab.bench.served_lenet import (
    MODEL,
    binary_post,
    binary_request,
    model_file,
    on_the_other_cores,
    pin,
    served,
)
from syncline.serving.serve import ModelServer

__all__ = ["load_suites", "slow_clients"]

_LAYERS = 40
"""Convolutions of the model in overload: about 10 ms of one core."""
_CHANNELS, _PIXELS = 64, 32
_TIMES = 3.0
"""The load as a multiple of what the server answered at most."""
_CONNECTIONS = 128
_FROM_S = 1.0
"""The first second of overload is not counted: a queue must stand for 0.1 s before requests are refused."""
_REFUSAL_MS = 5.0
_SLOW_CLIENTS = 1000
_TRICKLE_S = 0.002
"""One of the slow clients continues this often."""


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Overload, then slow clients."""
    settings.say(f"Exporting {MODEL}.")
    with model_file() as path:
        yield from load_suites(path, settings)


def load_suites(path: Path, settings: BenchSettings) -> Generator[Suite, None, None]:
    """The same with a file that is there."""
    seconds = 4.0 if settings.quick else 11.0
    with _convolutions_served() as server:
        yield _overload_suite(_Overload(server, seconds))
    count = 1000 if settings.quick else 5000
    with served(path) as quiet, served(path) as crowded:
        pin(quiet, crowded)
        with slow_clients(crowded.port, _SLOW_CLIENTS):
            yield _crowd_suite(_p99_of(quiet, count), _p99_of(crowded, count))


class _Overload:
    """One measurement without load and one of overload, whose parts are several contenders."""

    def __init__(self, server: ModelServer, seconds: float) -> None:
        self._port, self._seconds = server.port, seconds
        image = np.random.default_rng(0).standard_normal((1, 3, _PIXELS, _PIXELS), np.float32)
        self._request = binary_post("x", "FP32", image, "y")
        self._rate = 0.0
        self._answers = Answers(0.0)

    def unloaded_ms(self) -> float:
        """Requests one after the other; they also show what the server can do."""
        count = int(30 * self._seconds)
        with on_the_other_cores(), LoadClient(self._port, self._request, 1) as client:
            found = client.ask_all(count)
        self._rate = count / found.took_s
        return 1e3 * percentile(found.times(200), 0.99)

    def accepted_ms(self) -> float:
        with on_the_other_cores(), LoadClient(self._port, self._request, _CONNECTIONS) as client:
            self._answers = client.ask_at(_TIMES * self._rate, self._seconds)
        return 1e3 * percentile(self._answers.times(200, _FROM_S), 0.99)

    def refused_ms(self) -> float:
        return 1e3 * percentile(self._answers.times(503, _FROM_S), 0.99)


@contextlib.contextmanager
def _convolutions_served() -> Iterator[ModelServer]:
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        path = convolutions(Path(folder) / "convolutions.onnx")
        with served(path) as server:
            pin(server)
            yield server


def convolutions(path: Path) -> Path:
    """A network with random weights, as large as a small ResNet."""
    random = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for k in range(_LAYERS):
        inputs = _CHANNELS if k else 3
        values = random.standard_normal((_CHANNELS, inputs, 3, 3)) * np.sqrt(2 / (9 * inputs))
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{k}"))
        nodes.append(helper.make_node("Conv", [last, f"w{k}"], [f"c{k}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{k}"], [last := f"r{k}"]))
    nodes.append(helper.make_node("ReduceMean", [last], ["y"], axes=[2, 3], keepdims=0))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, _PIXELS, _PIXELS])
    found = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", _CHANNELS])
    graph = helper.make_graph(nodes, "convolutions", [given], [found], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _overload_suite(overload: _Overload) -> Suite:
    refusal, accepted, refused = "limit of a refusal", f"answered at {_TIMES:g} times", f"refused at {_TIMES:g} times"
    return Suite(
        name="serve-overload",
        measures=f"99th percentile of the time of a request: {_LAYERS} convolutions of an image, the server on one "
        f"core, and {_TIMES:g} times as many requests as it can answer, without the first {_FROM_S:g} s.",
        unit="ms",
        baseline="without load",
        contenders=(
            Contender(name="without load", measure=overload.unloaded_ms, what="One request after the other."),
            Contender(name=accepted, measure=overload.accepted_ms, what="Requests that got an answer."),
            Contender(name=refused, measure=overload.refused_ms, what="Requests that got 503."),
            Contender(name=refusal, measure=lambda: _REFUSAL_MS, what="A constant, to compare with."),
        ),
        goals=(Goal(contender=accepted, limit=2.0), Goal(contender=refused, limit=1.0, against=refusal)),
    )


def _p99_of(server: ModelServer, count: int) -> Callable[[], float]:
    def measure() -> float:
        with on_the_other_cores(), LoadClient(server.port, binary_request(), 4) as client:
            return 1e3 * percentile(client.ask_all(count).times(200), 0.99)

    return measure


def _crowd_suite(quiet: Callable[[], float], crowded: Callable[[], float]) -> Suite:
    name = f"{_SLOW_CLIENTS} slow clients"
    return Suite(
        name="serve-slow-clients",
        measures=f"99th percentile of the time of a request: {MODEL}, one image per request, 4 connections, the server "
        "on one core.",
        unit="ms",
        baseline="alone",
        contenders=(
            Contender(name="alone", measure=quiet),
            Contender(
                name=name, measure=crowded,
                what="Beside as many connections: a third silent, a third within a request, a third that sends it byte "
                "by byte.",
            ),
        ),
        goals=(Goal(contender=name, limit=1.5),),
    )  # fmt: skip


@contextlib.contextmanager
def slow_clients(port: int, count: int) -> Iterator[None]:
    """Connections that never finish a request, for as long as the block runs; those that end are opened again."""
    over = threading.Event()
    clients = [_SlowClient(port, kind=k % 3) for k in range(count)]

    def trickle() -> None:
        for client in itertools.cycle(clients):
            if over.wait(_TRICKLE_S):
                return
            client.go_on()

    sender = threading.Thread(target=trickle, name="slow-clients")
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        for client in clients:
            client.connection.close()


class _SlowClient:
    """One connection: 0 is silent, 1 stops within a request, 2 sends it byte by byte."""

    def __init__(self, port: int, kind: int) -> None:
        self._port, self._kind = port, kind
        self._request = binary_request()
        self._start()

    def go_on(self) -> None:
        """Send a byte; start again if the server ended the connection."""
        try:
            if self._kind == 2:
                self.connection.send(self._request[self._sent : self._sent + 1])
                self._sent += 1
            ended = not self.connection.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self.connection.close()
            self._start()

    def _start(self) -> None:
        self.connection, self._sent = socket.create_connection(("127.0.0.1", self._port), 10), 0
        if self._kind == 1:
            self.connection.sendall(self._request[: len(self._request) // 2])
