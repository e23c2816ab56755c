"""A server process without processes and sockets: requests as bytes go in, responses as bytes come out."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httptools
import numpy as np

from syncline.serving.server.access import Access
from syncline.serving.server.access_log import AccessLog
from syncline.serving.server.app import App
from syncline.serving.server.batching import Batcher
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.http import HttpServer
from syncline.serving.server.limits import Limits
from syncline.serving.server.metrics import ServerMetrics
from syncline.serving.server.registry import LoadedVersion, Registry
from syncline.serving.server.signature import Signature, TensorSpec
from syncline.serving.server.tuning import Tuned

TOKEN = "a-token-of-some-length"
BODY = json.dumps({"id": "q1", "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}).encode()


class Adds:
    """An engine in Python: y = x + number; raises for negative numbers."""

    platform, metadata, shares_batch_dimension = "test", None, True
    signature = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))

    def __init__(self, number: float = 1.0, error: Exception | None = None) -> None:
        self.number, self.error, self.batches = number, error, []

    def run(self, tensors):
        if self.error is not None:
            raise self.error
        self.batches.append(len(tensors["x"]))
        return [tensors["x"] + np.float32(self.number)]


class Transport:
    """What a connection writes and closes."""

    def __init__(self) -> None:
        self.written, self.is_closed, self.is_reading = b"", False, True

    def write(self, data):
        self.written += data

    def close(self):
        self.is_closed = True

    abort = close

    def is_closing(self):
        return self.is_closed

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True


class World:
    """A server process without processes: its loop runs until nothing is left to do."""

    def __init__(self, engine=None, *, token=None, limits=None, versions=None, log=None) -> None:
        self.loop = asyncio.new_event_loop()
        self.rolled_back = []
        metrics = ServerMetrics()
        self.registry = Registry(metrics, lambda served, reason: self.rolled_back.append((served.version, reason)))
        self.app = App(self.registry, metrics, Access(token), limits or Limits())
        self.http = HttpServer(self.app, AccessLog(log), self.loop)
        self.versions = versions or {("m", "1", "stable"): engine or Adds()}
        self.apply()

    def apply(self, withdrawn=()) -> None:
        loaded, served = {}, []
        for (model, version, role), engine in self.versions.items():
            one = ServedVersion(model=model, version=version, path="", role=role, share=0.5)
            batcher = Batcher(Tuned(engine, 1, 1e-4, 1e-4, 4, True), self.loop, ThreadPoolExecutor(1))
            loaded[one.key] = LoadedVersion(one, batcher._tuned, batcher)
            served.append(one)
        self.registry.apply(Catalog(versions=tuple(served), withdrawn=withdrawn), loaded)

    def connect(self):
        connection, transport = self.http.connect(), Transport()
        connection.connection_made(transport)
        return connection, transport

    def settle(self) -> None:
        for _ in range(50):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def send(self, *pieces: bytes):
        """The responses to these bytes on one connection, and its transport."""
        connection, transport = self.connect()
        for piece in pieces:
            connection.data_received(piece)
            self.settle()
        return responses(transport.written), transport

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str):
        """(status, JSON) of one request."""
        (response,), _ = self.send(request(method, path, body, **headers))
        return response.status, json.loads(response.body) if response.body else None

    def close(self) -> None:
        self.loop.close()


class Response:
    def __init__(self) -> None:
        self.headers, self.body, self.status = {}, b"", 0

    def on_header(self, name, value):
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body):
        self.body += body


def responses(data: bytes) -> list[Response]:
    found: list[Response] = []

    class Reader:
        def on_message_begin(self):
            found.append(Response())

        def on_header(self, name, value):
            found[-1].on_header(name, value)

        def on_body(self, body):
            found[-1].on_body(body)

        def on_message_complete(self):
            found[-1].status = parser.get_status_code()

    parser = httptools.HttpResponseParser(Reader())
    parser.feed_data(data)
    return found


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost:8000", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


INFER = "/v2/models/m/infer"
