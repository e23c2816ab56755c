"""LeNet as the benches of the server serve it: the model's file, servers pinned to a core, and requests.

Not here: sending the requests (`load.py`), what is measured (`serve.py`, `serve_load.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from syncline.serving.exporting.onnx_file import export_onnx
from syncline.serving.serve import ModelServer
from syncline.serving.server.options import ServeOptions

__all__ = [
    "MODEL",
    "PING",
    "binary_request",
    "images",
    "json_body",
    "json_request",
    "model_file",
    "on_the_other_cores",
    "pin",
    "post",
    "served",
]

MODEL = "lenet"
PING = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def images(count: int = 1) -> np.ndarray:
    """Random pixels, the same ones each time."""
    return np.random.default_rng(0).integers(0, 256, (count, 1, 28, 28), np.uint8)


def binary_request(count: int = 1) -> bytes:
    """A request with this many images as binary data."""
    return binary_post("input", "UINT8", images(count), "logits")


def binary_post(name: str, datatype: str, array: np.ndarray, output: str) -> bytes:
    """A request to the model `lenet`, or to another one that is served under this name."""
    tensor = {"name": name, "shape": array.shape, "datatype": datatype,
              "parameters": {"binary_data_size": array.nbytes}}  # fmt: skip
    wanted = {"name": output, "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
    return post(head + array.tobytes(), f"Inference-Header-Content-Length: {len(head)}\r\n")


def json_request() -> bytes:
    """A request with one image as JSON."""
    return post(json_body(), "")


def json_body() -> bytes:
    given = images()
    tensor = {"name": "input", "shape": given.shape, "datatype": "UINT8", "data": given.ravel().tolist()}
    return json.dumps({"inputs": [tensor], "outputs": [{"name": "logits"}]}).encode()


def post(body: bytes, headers: str, path: str = f"/v2/models/{MODEL}/infer") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def model_file() -> Iterator[Path]:
    """The exported model, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        path = Path(folder) / f"{MODEL}.onnx"
        export_onnx(MODEL, path)
        yield path


@contextlib.contextmanager
def served(path: Path, *, max_batch: int = 8, processes: int = 1) -> Iterator[ModelServer]:
    options = ServeOptions(what=(str(path),), name=MODEL, max_batch=max_batch, processes=processes)
    server = ModelServer(options)
    try:
        yield server
    finally:
        server.close()


def pin(*servers: ModelServer) -> None:
    """Have the processes of these servers run on one core, the first one."""
    core = min(os.sched_getaffinity(0))
    for pid in (pid for server in servers for pid in server.pids()):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {core})


@contextlib.contextmanager
def on_the_other_cores() -> Iterator[None]:
    """This process does not run on the core of the servers, if there is another one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {min(cores)} or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
