"""`syncline.serve`: a server for as long as a `with` block or a notebook runs, and a client for it.

Here: starting it as a process of its own, and asking it. Not here: the server (`serving/server/`).
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from syncline.boundary import guarding
from syncline.errors import ConfigError, SynclineError
from syncline.serving.server.datatypes import DTYPES, datatype_of, from_bytes, from_json, to_bytes
from syncline.serving.server.options import ServeOptions

__all__ = ["ModelServer", "serve"]

_STOP_S = 20.0
_REQUEST_S = 60.0


def serve(
    what: str | Path,
    *more: str | Path,
    name: str | None = None,
    port: int = 0,
    token: bool = True,
    processes: int = 1,
    canary: float | None = None,
    shadow: bool = False,
    follow: bool = False,
    max_batch: int = 8,
    grpc: bool = False,
    engine: str = "local",
) -> ModelServer:
    """Serve runs or ONNX files on this machine or on Ray, until `close` or the end of a `with` block.

    The options are those of `syncline serve`.

    >>> with syncline.serve("runs/lenet-mnist") as server:                       # doctest: +SKIP
    ...     server.predict(images).argmax(axis=1)
    """
    options = ServeOptions(
        what=tuple(str(one) for one in (what, *more)), name=name, port=port,
        token=secrets.token_urlsafe(24) if token else None, processes=processes, canary=canary, shadow=shadow,
        follow=follow, max_batch=max_batch, grpc_port=0 if grpc else None, engine=engine,
    )  # fmt: skip
    with guarding():
        return ModelServer(options)


class ModelServer:
    """A server in a process of its own."""

    def __init__(self, options: ServeOptions) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "syncline.serving.server.serve_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(options) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = msgspec.json.decode(line) if line else {}
        if "port" not in answer:
            self.close()
            code = answer.get("code", "server-failed")
            raise ConfigError(answer.get("error", "The server ended; its error is above."), code=code)
        self.port: int = answer["port"]
        self.grpc_port: int | None = answer["grpc_port"]
        self.token = options.token
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_REQUEST_S)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where the protocol's clients find it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def page(self) -> str:
        """The address of the page to try the models by hand."""
        return f"{self.url}/?token={self.token}" if self.token else f"{self.url}/"

    def pids(self) -> list[int]:
        """The processes that answer, without their supervisor."""
        supervisor = self._process.pid
        return [int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]

    def models(self) -> list[str]:
        """The names of the models."""
        return sorted({one["name"] for one in self._ask("POST", "/v2/repository/index", b'{"ready": true}')})

    def metadata(self, model: str | None = None) -> dict[str, Any]:
        """The inputs, the outputs and the versions of a model, by default of the only one."""
        found: dict[str, Any] = self._ask("GET", f"/v2/models/{self._model(model)}")
        return found

    def predict(self, array: np.ndarray | list[Any], *, model: str | None = None) -> np.ndarray:
        """The answers to a batch: its output `probabilities` if the model has one, else its first output."""
        spec = self.metadata(model)
        (first, *others) = spec["inputs"]
        if others:
            raise ConfigError(f"{spec['name']} has several inputs. Use infer.", code="several-inputs")
        found = self.infer({first["name"]: np.asarray(array, DTYPES[first["datatype"]])}, model=model)
        return found.get("probabilities", next(iter(found.values())))

    def infer(self, tensors: Mapping[str, np.ndarray], *, model: str | None = None) -> dict[str, np.ndarray]:
        """All outputs by name, for inputs by name."""
        data = [to_bytes(array) for array in tensors.values()]
        inputs = [
            {"name": name, "datatype": datatype_of(array.dtype), "shape": array.shape,
             "parameters": {"binary_data_size": len(one)}}
            for (name, array), one in zip(tensors.items(), data, strict=True)
        ]  # fmt: skip
        head = msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True}})
        path = f"/v2/models/{self._model(model)}/infer"
        body, json_size = self._request("POST", path, b"".join([head, *data]), len(head))
        return _outputs(body, json_size)

    def reload(self, model: str | None = None) -> None:
        """Read the sources of a model again: the file, or the newest checkpoint of the run."""
        self._ask("POST", f"/v2/repository/models/{self._model(model)}/load", b"{}")

    def close(self) -> None:
        """End the server after the requests in flight."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _model(self, name: str | None) -> str:
        if name is not None:
            return name
        names = self.models()
        if len(names) != 1:
            raise ConfigError(f"Say which model: {', '.join(names)}.", code="several-models", models=names)
        return names[0]

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        return msgspec.json.decode(self._request(method, path, body)[0])

    def _request(
        self, method: str, path: str, body: bytes | None = None, json_size: int | None = None
    ) -> tuple[bytes, int]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        if json_size is not None:
            headers["Inference-Header-Content-Length"] = str(json_size)
        with self._lock:
            try:
                self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                data = response.read()
            except OSError:
                self._connection.close()  # the next request opens a new one
                raise
        if response.status >= 400:
            error = msgspec.json.decode(data).get("error", response.reason)
            raise SynclineError(error, code="request-refused", status=response.status)
        return data, int(response.headers.get("Inference-Header-Content-Length", len(data)))


def _outputs(body: bytes, json_size: int) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    place = json_size
    for output in msgspec.json.decode(body[:json_size])["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            found[name] = from_json(output["data"], datatype, shape, name)
        else:
            found[name] = from_bytes(body[place : place + size], datatype, shape, name)
            place += size
    return found
