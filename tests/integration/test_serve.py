"""The server as users have it: real processes, real clients, real faults. All traffic is on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from serving_models import adds, repeats_text, slow, two_outputs

import syncline
from syncline.serving.serve import ModelServer
from syncline.serving.server.options import ServeOptions

pytestmark = pytest.mark.xdist_group("serve")  # one process, because these tests share a fixture

WAIT_S = 30.0


def until(is_true, limit_s: float = WAIT_S) -> None:
    """Wait until something is true, or fail."""
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, "It did not become true in time."
        threading.Event().wait(0.005)


@contextlib.contextmanager
def command(*arguments: str, cwd: Path):
    """`syncline serve` as a process: (process, its base URL, token). It has ended when this is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline", "serve", *arguments, "--port", "0"],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        found = re.search(r"(https?)://([\d.]+):(\d+)/(?:\?token=(\S+))?", line)
        assert found, line + process.stderr.read()
        yield process, int(found[3]), found[4]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(20)
        process.stdout.close()
        process.stderr.close()


@contextlib.contextmanager
def served(path: Path, **options):
    """A server without a token: (its process, its port)."""
    server = ModelServer(ServeOptions(what=(str(path),), **options))
    try:
        yield server._process, server.port
    finally:
        server.close()


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def request_of(number: float = 0.0, size: int = 4) -> bytes:
    data = [number] * size
    return json.dumps({"inputs": [{"name": "x", "shape": [1, size], "datatype": "FP32", "data": data}]}).encode()


class Client:
    """One connection, JSON."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, method: str, path: str, body: bytes | None = None):
        self.connection.request(method, path, body, self.headers)
        response = self.connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data[:1] in (b"{", b"[") else data.decode()

    def infer(self, number: float = 0.0, model: str = "m"):
        return self.ask("POST", f"/v2/models/{model}/infer", request_of(number))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One server with several models, for the clients."""
    folder = tmp_path_factory.mktemp("models")
    paths = [adds(folder / "m.onnx", 1.0), two_outputs(folder / "two.onnx"), repeats_text(folder / "words.onnx")]
    with syncline.serve(*paths, token=False, grpc=True) as server:
        yield server


# real clients


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_over_http_json_and_binary(models, binary):
    client = triton.InferenceServerClient(f"127.0.0.1:{models.port}")
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("two")
        assert client.get_server_metadata()["name"] == "syncline"
        assert [one["name"] for one in client.get_model_metadata("two")["inputs"]] == ["x", "n"]
        assert {one["name"] for one in client.get_model_repository_index()} == {"m", "two", "words"}
        x, n = np.ones((2, 3), np.float32), np.arange(6, dtype=np.int64).reshape(2, 3)
        inputs = [triton.InferInput("x", x.shape, "FP32"), triton.InferInput("n", n.shape, "INT64")]
        for one, array in zip(inputs, (x, n), strict=True):
            one.set_data_from_numpy(array, binary_data=binary)
        wanted = [triton.InferRequestedOutput("product", binary_data=binary)]
        result = client.infer("two", inputs, outputs=wanted, request_id="mine")
        assert np.array_equal(result.as_numpy("product"), x * n)
        assert result.as_numpy("sum") is None
        assert result.get_response()["id"] == "mine"
        everything = client.infer("two", inputs)
        assert np.array_equal(everything.as_numpy("sum"), x + n)
        client.load_model("m")
        with pytest.raises(triton.InferenceServerException, match="no model"):
            client.infer("other", inputs)
    finally:
        client.close()


def test_tritonclient_sends_strings(models):
    client = triton.InferenceServerClient(f"127.0.0.1:{models.port}")
    try:
        words = np.array([["grün"], [""], ["three words here"]], object)
        given = triton.InferInput("words", words.shape, "BYTES")
        given.set_data_from_numpy(words)
        found = client.infer("words", [given]).as_numpy("same")
        assert [value.decode() for value in found.ravel()] == words.ravel().tolist()
    finally:
        client.close()


def test_tritonclient_with_asyncio(models):
    async def ask() -> np.ndarray:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{models.port}") as client:
            given = triton_aio.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.zeros((1, 4), np.float32))
            results = await asyncio.gather(*[client.infer("m", [given]) for _ in range(8)])
            return np.concatenate([result.as_numpy("y") for result in results])

    assert np.array_equal(asyncio.run(ask()), np.ones((8, 4), np.float32))


def test_tritonclient_over_grpc(models):
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{models.grpc_port}")
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("two")
        assert not client.is_model_ready("other")
        assert client.get_server_metadata().name == "syncline"
        assert [one.name for one in client.get_model_metadata("two").inputs] == ["x", "n"]
        x, n = np.ones((2, 3), np.float32), np.arange(6, dtype=np.int64).reshape(2, 3)
        inputs = [triton_grpc.InferInput("x", x.shape, "FP32"), triton_grpc.InferInput("n", n.shape, "INT64")]
        for one, array in zip(inputs, (x, n), strict=True):
            one.set_data_from_numpy(array)
        result = client.infer("two", inputs, outputs=[triton_grpc.InferRequestedOutput("product")], request_id="mine")
        assert np.array_equal(result.as_numpy("product"), x * n)
        assert result.as_numpy("sum") is None
        assert result.get_response().id == "mine"
        for model, given in (("other", inputs), ("two", inputs[:1])):
            with pytest.raises(triton_grpc.InferenceServerException):
                client.infer(model, given)
    finally:
        client.close()


def test_tritonclient_over_grpc_with_asyncio(models):
    async def ask() -> np.ndarray:
        async with triton_grpc_aio.InferenceServerClient(f"127.0.0.1:{models.grpc_port}") as client:
            given = triton_grpc_aio.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.zeros((1, 4), np.float32))
            results = await asyncio.gather(*[client.infer("m", [given]) for _ in range(8)])
            return np.concatenate([result.as_numpy("y") for result in results])

    assert np.array_equal(asyncio.run(ask()), np.ones((8, 4), np.float32))


def test_grpc_needs_the_token_too(tmp_path):
    with syncline.serve(adds(tmp_path / "m.onnx", 1.0), grpc=True) as server:
        client = triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        try:
            given = triton_grpc.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.zeros((1, 4), np.float32))
            with pytest.raises(triton_grpc.InferenceServerException, match="UNAUTHENTICATED"):
                client.infer("m", [given])
            found = client.infer("m", [given], headers={"authorization": f"Bearer {server.token}"})
            assert found.as_numpy("y").tolist() == [[1.0] * 4]
        finally:
            client.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_posts_a_file(models, tmp_path):
    (tmp_path / "request.json").write_bytes(request_of(1.0))
    url = f"{models.url}/v2/models/m/infer"
    done = subprocess.run(["curl", "-sS", "-d", "@request.json", url], cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [2.0] * 4
    big = tmp_path / "big.json"  # curl asks first whether it may send this much
    big.write_bytes(request_of(1.0) + b" " * 2_000_000)
    done = subprocess.run(["curl", "-sS", "-d", "@big.json", url], cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [2.0] * 4


def test_answers_equal_those_of_onnx_runtime_alone(models, tmp_path):
    import onnxruntime

    session = onnxruntime.InferenceSession(two_outputs(tmp_path / "two.onnx"))
    x, n = np.random.default_rng(0).standard_normal((5, 3), np.float32), np.arange(15).reshape(5, 3)
    expected = session.run(None, {"x": x, "n": n})
    found = models.infer({"x": x, "n": n}, model="two")
    assert [np.array_equal(found[name], one) for name, one in zip(("sum", "product"), expected, strict=True)] == [
        True, True
    ]  # fmt: skip


# Python


def test_python_serves_predicts_and_reloads(tmp_path):
    path = adds(tmp_path / "m.onnx", 1.0)
    with syncline.serve(path) as server:
        assert server.predict([[1, 2, 3, 4]]).tolist() == [[2, 3, 4, 5]]
        with pytest.raises(syncline.SynclineError) as raised:
            server.predict(np.zeros((1, 5)))
        assert raised.value.facts["status"] == 400
        adds(path, 5.0)
        server.reload()
        assert server.predict([[1, 2, 3, 4]]).tolist() == [[6, 7, 8, 9]]
        path.write_bytes(b"no model")
        with pytest.raises(syncline.SynclineError):
            server.reload()
        assert server.predict([[1, 2, 3, 4]]).tolist() == [[6, 7, 8, 9]]


def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path):
    with pytest.raises(syncline.ConfigError) as raised:
        syncline.serve(tmp_path / "missing.onnx")
    assert raised.value.code == "no-model-file"
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(syncline.ConfigError) as raised:
        syncline.serve(tmp_path / "bad.onnx")
    assert raised.value.code == "cannot-serve"
    with pytest.raises(syncline.ConfigError) as raised:
        syncline.serve(adds(tmp_path / "m.onnx", 1.0), follow=True)
    assert raised.value.code == "nothing-to-follow"


# the command


def test_the_command_prints_an_address_with_a_token_and_logs_requests(tmp_path):
    adds(tmp_path / "m.onnx", 1.0)
    with command("m.onnx", "--access-log", "log", cwd=tmp_path) as (process, port, token):
        assert Client(port).infer()[0] == 401
        assert Client(port, token).infer(2.0)[1]["outputs"][0]["data"] == [3.0] * 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert [json.loads(line)["status"] for line in (tmp_path / "log").read_text().splitlines()] == [401, 200]


def test_tls_by_files(tmp_path):
    adds(tmp_path / "m.onnx", 1.0)
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN=localhost -addext"
    subprocess.run([*make.split(), "subjectAltName=IP:127.0.0.1"], cwd=tmp_path, check=True, capture_output=True)
    files = {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    with served(tmp_path / "m.onnx", **files) as (_, port):
        client = Client(port)
        trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        client.connection = http.client.HTTPSConnection("127.0.0.1", port, context=trusted, timeout=WAIT_S)
        assert client.infer(1.0)[1]["outputs"][0]["data"] == [2.0] * 4
        client.connection.close()


# versions


def test_a_worse_canary_is_rolled_back_in_all_processes(tmp_path):
    good, bad = adds(tmp_path / "good.onnx", 1.0), adds(tmp_path / "bad.onnx", float("nan"))
    with syncline.serve(good, bad, name="m", canary=0.5, token=False, processes=2) as server:
        client = Client(server.port)
        statuses = [client.infer()[0] for _ in range(60)]
        assert 500 in statuses
        until(lambda: Client(server.port).ask("GET", "/v2/models/m")[1]["versions"] == ["1"])
        assert {Client(server.port).infer()[0] for _ in range(20)} == {200}
        index = client.ask("POST", "/v2/repository/index")[1]
        assert [(one["version"], one["state"]) for one in index] == [("1", "READY"), ("2", "UNAVAILABLE")]
        assert "rolled back" in index[1]["reason"]


def test_a_canary_that_is_wrong_more_often_is_rolled_back_when_labels_come_back(tmp_path):
    good, bad = adds(tmp_path / "good.onnx", 0.0), adds(tmp_path / "bad.onnx", 1.0)
    with syncline.serve(good, bad, name="m", canary=0.5, token=False) as server:
        client = Client(server.port)

        def ask_and_label(k: int) -> str:
            """The version that answered; the right answer is what went in, which only the stable version gives."""
            status, answer = client.infer(float(k))
            assert status == 200
            label = {"outcomes": [{"prediction": answer["outputs"][0]["data"][0], "label": k}]}
            address = f"/v2/models/m/versions/{answer['model_version']}/feedback"
            status, counted = client.ask("POST", address, json.dumps(label).encode())
            assert (status, counted["counted"]) == (200, 1)
            return answer["model_version"]

        labeled = [ask_and_label(k) for k in range(39)]
        assert set(labeled) == {"1", "2"}, "Too few labels to decide, and nothing else is wrong with the canary."
        ask_and_label(39)
        until(lambda: client.ask("GET", "/v2/models/m")[1]["versions"] == ["1"])
        index = client.ask("POST", "/v2/repository/index")[1]
        assert "0.0% of its 20 predictions with labels are right, against 100.0% of 20" in index[1]["reason"]
        assert {client.infer()[1]["model_version"] for _ in range(10)} == {"1"}


def test_versions_of_one_name_answer_by_their_number_and_unload_ends_them(tmp_path):
    paths = [adds(tmp_path / f"{k}.onnx", float(k)) for k in (1, 2)]
    with syncline.serve(*paths, name="m", token=False) as server:
        client = Client(server.port)
        assert client.infer()[1]["outputs"][0]["data"] == [2.0] * 4
        first = client.ask("POST", "/v2/models/m/versions/1/infer", request_of())[1]
        assert (first["model_version"], first["outputs"][0]["data"]) == ("1", [1.0] * 4)
        assert client.ask("POST", "/v2/repository/models/m/unload")[0] == 200
        assert client.infer()[0] == 404
        assert client.ask("POST", "/v2/repository/models/m/load")[0] == 200
        assert client.infer()[1]["outputs"][0]["data"] == [2.0] * 4


# load and faults


def ask_until(stop: threading.Event, port: int, seen: list) -> None:
    client = Client(port)
    k = 0
    while not stop.is_set():
        k += 1
        status, answer = client.infer(float(k))
        seen.append((status, answer.get("model_version"), answer["outputs"][0]["data"] if status == 200 else None, k))


def test_reloads_under_load_lose_no_request_and_mix_no_versions(tmp_path):
    path = adds(tmp_path / "m.onnx", 1000.0)
    stop, seen = threading.Event(), [[] for _ in range(4)]
    with syncline.serve(path, token=False, processes=2) as server, ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_until, stop, server.port, one) for one in seen]
        try:
            for version in range(2, 9):
                adds(path, 1000.0 * version)
                server.reload()
        finally:
            stop.set()
        for one in asking:
            one.result(WAIT_S)
    answers = [answer for one in seen for answer in one]
    assert {status for status, *_ in answers} == {200}
    assert all(data == [1000.0 * int(version) + k] * 4 for _, version, data, k in answers)
    assert len({version for _, version, *_ in answers}) >= 3


def test_a_killed_process_is_replaced_and_costs_its_requests_in_flight_only(tmp_path):
    adds(tmp_path / "m.onnx", 1.0)
    with served(tmp_path / "m.onnx", processes=2) as (process, port):
        victims = children(process.pid)
        assert len(victims) == 2
        start = time.monotonic()
        os.kill(victims[0], signal.SIGKILL)
        # New connections are never refused: the supervisor holds the sockets.
        for _ in range(20):
            assert Client(port).infer(1.0)[0] == 200
        until(lambda: len(set(children(process.pid)) - {victims[0]}) == 2)
        assert time.monotonic() - start < 10


def test_requests_in_flight_end_before_the_server_does(tmp_path):
    slow(tmp_path / "m.onnx", size=1024, rounds=10)
    body = request_of(1.0, 1024)
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with served(tmp_path / "m.onnx") as (process, port), contextlib.ExitStack() as opened:
        connections = [opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S)) for _ in range(3)]
        for one in connections:
            one.sendall(head % len(body))
            assert one.recv(100).startswith(b"HTTP/1.1 100")  # the server has begun to read this request
        process.send_signal(signal.SIGTERM)
        until(lambda: is_refused(port))
        for one in connections:
            one.sendall(body)
        assert [one.recv(100)[:12] for one in connections] == [b"HTTP/1.1 200"] * 3
        assert process.wait(20) == 0


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionError:
        return True
    return False


def test_many_slow_and_half_open_connections_harm_nobody(tmp_path):
    path = adds(tmp_path / "m.onnx", 1.0)
    with syncline.serve(path, token=False) as server, contextlib.ExitStack() as opened:
        for k in range(500):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            if k % 2:
                connection.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
        client = Client(server.port)
        assert all(client.infer(float(k))[1]["outputs"][0]["data"] == [k + 1.0] * 4 for k in range(100))
        text = client.ask("GET", "/metrics")[1]
        assert 'syncline_connections{process="0"} 50' in text  # 501 and the client of the context


def test_overload_gets_503_at_once_while_accepted_requests_are_answered(tmp_path):
    slow(tmp_path / "m.onnx", size=1024, rounds=10)
    body = request_of(1.0, 1024)
    with served(tmp_path / "m.onnx", max_requests=2) as (_, port):

        def ask(_: int):
            client, found = Client(port), []
            for _ in range(15):
                start = time.monotonic()
                status, _ = client.ask("POST", "/v2/models/m/infer", body)
                found.append((status, time.monotonic() - start))
            return found

        with ThreadPoolExecutor(6) as pool:
            answers = [one for found in pool.map(ask, range(6)) for one in found]
        statuses = {status for status, _ in answers}
        assert statuses == {200, 503}
        assert Client(port).ask("GET", "/v2/health/ready")[0] == 200


def test_memory_is_flat_over_many_reloads(tmp_path):
    path = adds(tmp_path / "m.onnx", 1.0)
    with served(path) as (process, port):
        client = Client(port)
        (child,) = children(process.pid)

        def reload(count: int) -> int:
            for _ in range(count):
                assert client.ask("POST", "/v2/repository/models/m/load")[0] == 200
            return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{child}/status").read_text())[1])

        before = reload(20)
        assert reload(60) - before < 6_000  # kB; a leaked session is about 200
        assert client.infer(1.0)[1]["model_version"] == "81"
