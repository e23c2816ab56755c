"""Serving on Ray without Ray: what is refused, and how a replica answers the requests of its proxy."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from serving_models import adds

from syncline.errors import ConfigError
from syncline.serving.ray_serve import replica as replicas
from syncline.serving.server.catalog import ServedVersion
from syncline.serving.server.limits import Limits
from syncline.serving.server.options import ServeOptions, make_server

INFER = "/v2/models/m/versions/1/infer"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1] * 4}]}).encode()


class Request:
    """A request as the proxy passes it on."""

    def __init__(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"method": method, "path": path, "query_string": b"", "headers": [(b"host", b"localhost"), *given]}
        self._body = body

    async def stream(self):
        for place in range(0, len(self._body), 50):
            yield self._body[place : place + 50]
        yield b""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Ask a replica with one model: (status, the answer's JSON)."""
    path = adds(tmp_path / "m.onnx", 1.0)
    served = ServedVersion(model="m", version="1", path=path.name)
    files = replicas.VersionFiles(served=served, files={path.name: path.read_bytes()})
    monkeypatch.setitem(sys.modules, "ray", type("Ray", (), {"get": staticmethod(lambda found: found)}))
    settings = replicas.ReplicaSettings(limits=Limits(body_bytes=200), token=None, cores=1, max_batch=4)
    replica = replicas.Replica([files], settings)

    def ask(*given, **headers):
        async def answer():
            return await replicas._answer(replica._start(), Request(*given, **headers))

        response = asyncio.run(answer())
        return response.status, json.loads(response.body)

    return ask


def test_a_replica_answers_as_our_own_server_does(ask):
    status, answer = ask("POST", INFER, BODY)
    assert (status, answer["model_version"], answer["outputs"][0]["data"]) == (200, "1", [2.0] * 4)
    assert ask("GET", "/v2/models/m")[1]["versions"] == ["1"]
    assert ask("GET", "/v2/health/ready") == (200, {"ready": True})


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", INFER, b"{", {}, 400),
        ("POST", "/v2/models/other/infer", BODY, {}, 404),
        ("GET", INFER, b"", {}, 405),
        ("POST", INFER, BODY + b" " * 200, {}, 413),
        ("POST", INFER, BODY, {"origin": "http://evil.example"}, 403),
        ("POST", "/v2/repository/models/m/load", b"", {}, 400),
        ("POST", "/v2/repository/models/m/unload", b"", {}, 400),
    ],
)
def test_a_replica_refuses_what_our_own_server_refuses(ask, method, path, body, headers, status):
    found, answer = ask(method, path, body, **headers)
    assert found == status
    assert set(answer) == {"error"}


@pytest.mark.parametrize(
    ("options", "code", "fact"),
    [
        ({"shadow": True}, "not-on-ray", "--shadow"),
        ({"canary": 0.1}, "not-on-ray", "--canary"),
        ({"grpc_port": 0}, "not-on-ray", "--grpc-port"),
        ({"access_log": "-"}, "not-on-ray", "--access-log"),
        ({"engine": "ray://nowhere"}, "invalid-engine", "ray://nowhere"),
        ({"engine": "spark"}, "invalid-engine", "spark"),
    ],
)
def test_what_ray_cannot_do_is_refused_before_anything_starts(tmp_path, options, code, fact):
    files = [str(adds(tmp_path / f"{name}.onnx", 1.0)) for name in "ab"]
    with pytest.raises(ConfigError) as raised:
        make_server(ServeOptions(**{"what": files, "engine": "ray", **options}), print)
    assert raised.value.code == code
    assert fact in str(raised.value.facts)


@pytest.mark.parametrize("package", ["ray", "ray.serve"])
def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    if package == "ray.serve":
        monkeypatch.delattr("ray.serve", raising=False)
    with pytest.raises(ConfigError, match="pip install") as raised:
        make_server(ServeOptions(what=(str(adds(tmp_path / "m.onnx", 1.0)),), engine="ray"), print)
    assert raised.value.code == "not-installed"
