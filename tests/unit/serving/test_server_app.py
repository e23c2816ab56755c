"""The server without a socket: requests as bytes go in, responses as bytes come out."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httptools
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.serving.server.access import Access
from syncline.serving.server.access_log import AccessLog
from syncline.serving.server.app import App
from syncline.serving.server.batching import Batcher
from syncline.serving.server.catalog import Catalog, ServedVersion, Withdrawn
from syncline.serving.server.http import HttpServer
from syncline.serving.server.limits import Limits
from syncline.serving.server.metrics import ServerMetrics
from syncline.serving.server.options import ServeOptions, make_server, token_of
from syncline.serving.server.registry import LoadedVersion, Registry
from syncline.serving.server.signature import Signature, TensorSpec
from syncline.serving.server.sources import read_share, sources_of
from syncline.serving.server.tuning import Tuned, probe

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


@pytest.fixture
def world():
    made: list[World] = []

    def make(*arguments, **options) -> World:
        made.append(World(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


INFER = "/v2/models/m/infer"


def test_the_protocol_answers_with_metadata_health_and_inference(world):
    server = world()
    assert server.ask("GET", "/v2")[1]["name"] == "syncline"
    assert server.ask("GET", "/v2/health/live") == (200, {"live": True})
    assert server.ask("GET", "/v2/health/ready") == (200, {"ready": True})
    assert server.ask("GET", "/v2/models/m/ready") == (200, {"name": "m", "ready": True})
    assert server.ask("GET", "/v2/models/m/versions/1")[1]["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    ]
    status, answer = server.ask("POST", "/v2/models/m/versions/1/infer", BODY)
    assert status == 200
    assert answer["id"] == "q1"
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 3.0]}]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", b"", 404),
        ("GET", "/v2/models/other", b"", 404),
        ("POST", "/v2/models/m/versions/9/infer", BODY, 404),
        ("GET", INFER, b"", 405),
        ("POST", INFER, b"{", 400),
        ("POST", INFER, b'{"inputs": []}', 400),
        ("POST", INFER, BODY.replace(b"FP32", b"INT8"), 400),
        ("POST", INFER, BODY.replace(b'[1, 2], "datatype', b'[1, 3], "datatype'), 400),
        ("POST", INFER, BODY.replace(b'"data": [1, 2]', b'"data": [1, "2"]'), 400),
        ("POST", INFER, BODY.replace(b'"data": [1, 2]', b'"data": [1, true]'), 400),
        ("POST", INFER, BODY.replace(b'"data": [1, 2]', b'"data": [1e300, 2]'), 400),
        ("POST", INFER, BODY[:-1] + b', "outputs": [{"name": "z"}]}', 400),
        ("POST", INFER, BODY[:-1] + b', "outputs": [{"name": "y", "parameters": {"classification": 3}}]}', 400),
        ("POST", "/v2/repository/models/other/load", b"", 404),
    ],
)
def test_wrong_requests_get_the_protocols_error(world, method, path, body, status):
    found, answer = world().ask(method, path, body)
    assert found == status
    assert set(answer) == {"error"}


def test_a_model_that_fails_gives_500_and_the_server_goes_on(world):
    engine = Adds(error=RuntimeError("no"))
    server = world(engine)
    assert server.ask("POST", INFER, BODY)[0] == 500
    engine.error = None
    assert server.ask("POST", INFER, BODY)[0] == 200


def test_an_output_that_json_cannot_hold_is_an_error_and_binary_holds_it(world):
    server = world(Adds(float("nan")))
    assert server.ask("POST", INFER, BODY)[0] == 500
    (response,), _ = server.send(request("POST", INFER, BODY[:-1] + b', "parameters": {"binary_data_output": true}}'))
    size = int(response.headers["inference-header-content-length"])
    assert np.isnan(np.frombuffer(response.body[size:], "<f4")).all()


def test_raw_requests_are_the_data_of_the_only_input(world):
    data = np.arange(6, dtype="<f4").tobytes()
    (response,), _ = world().send(request("POST", INFER, data, Inference_Header_Content_Length="0"))
    size = int(response.headers["inference-header-content-length"])
    assert np.frombuffer(response.body[size:], "<f4").tolist() == [1, 2, 3, 4, 5, 6]


@given(st.lists(st.integers(1, 400), max_size=6))
def test_bytes_may_arrive_in_any_pieces(cuts):
    data = request("POST", INFER, BODY) + request("GET", "/v2/health/live") + request("POST", INFER, BODY)
    edges = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    server = World()
    try:
        found, _ = server.send(*[data[a:b] for a, b in pairwise(edges)])
    finally:
        server.close()
    assert [one.status for one in found] == [200, 200, 200]
    assert [len(one.body) > 60 for one in found] == [True, False, True]


def test_requests_that_are_there_together_run_together_and_are_not_mixed_up(world):
    engine = Adds()
    server = world(engine)
    connections = [server.connect() for _ in range(6)]
    for k, (connection, _) in enumerate(connections):
        connection.data_received(request("POST", INFER, BODY.replace(b"[1, 2]}", b"[%d, 2]}" % k)))
    server.settle()
    answers = [json.loads(responses(transport.written)[0].body) for _, transport in connections]
    assert [answer["outputs"][0]["data"][0] for answer in answers] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert engine.batches == [4, 2]


def test_a_request_ends_on_the_version_that_it_began_on(world):
    server = world(Adds(1.0))
    connection, transport = server.connect()
    connection.data_received(request("POST", INFER, BODY))  # queued: the loop has not run
    server.versions = {("m", "2", "stable"): Adds(100.0)}
    server.apply(withdrawn=(Withdrawn(model="m", version="1", reason="replaced"),))
    server.settle()
    old = json.loads(responses(transport.written)[0].body)
    new = server.ask("POST", INFER, BODY)[1]
    assert (old["model_version"], old["outputs"][0]["data"]) == ("1", [2.0, 3.0])
    assert (new["model_version"], new["outputs"][0]["data"]) == ("2", [101.0, 102.0])
    states = {one["version"]: one["state"] for one in server.ask("POST", "/v2/repository/index")[1]}
    assert states == {"1": "UNAVAILABLE", "2": "READY"}


def test_a_canary_takes_its_share_and_is_given_up_if_it_fails(world):
    server = world(versions={("m", "1", "stable"): Adds(), ("m", "2", "canary"): Adds(error=RuntimeError("no"))})
    statuses = [server.ask("POST", INFER, BODY)[0] for _ in range(60)]
    assert set(statuses[:38]) == {200, 500}
    assert set(statuses[42:]) == {200}
    assert [version for version, _ in server.rolled_back] == ["2"]


def test_a_canary_whose_outputs_are_not_finite_is_given_up(world):
    server = world(versions={("m", "1", "stable"): Adds(), ("m", "2", "canary"): Adds(float("nan"))})
    for _ in range(60):
        server.ask("POST", INFER, BODY)
    assert [version for version, _ in server.rolled_back] == ["2"]


def test_wrong_requests_do_not_count_against_a_canary(world):
    server = world(versions={("m", "1", "stable"): Adds(), ("m", "2", "canary"): Adds()})
    for _ in range(60):
        assert server.ask("POST", INFER, BODY.replace(b"FP32", b"INT8"))[0] == 400
        assert server.ask("POST", INFER, BODY)[0] == 200
    assert server.rolled_back == []


def feedback(predictions: list, labels: list) -> bytes:
    pairs = zip(predictions, labels, strict=True)
    return json.dumps(
        {"outcomes": [{"prediction": prediction, "label": label} for prediction, label in pairs]}
    ).encode()


def test_labels_are_counted_for_the_version_that_predicted(world):
    server = world(versions={("m", "1", "stable"): Adds(), ("m", "2", "pinned"): Adds()})
    address = "/v2/models/m/versions/2/feedback"
    assert server.ask("POST", address, feedback([7, 3.0, 1], [7, 3, 0])) == (200, {"counted": 3, "right": 2})
    assert server.ask("POST", address, feedback(["cat"], ["cat"])) == (200, {"counted": 1, "right": 1})
    (response,), _ = server.send(request("GET", "/metrics"))
    counted = [line for line in response.body.decode().splitlines() if line.startswith("syncline_labels_total")]
    assert counted == [
        'syncline_labels_total{model="m",version="2",outcome="right",process="0"} 3',
        'syncline_labels_total{model="m",version="2",outcome="wrong",process="0"} 1',
    ]


@pytest.mark.parametrize(
    ("version", "body", "status"),
    [
        ("9", feedback([1], [1]), 404),
        ("1", b'{"outcomes": [{"prediction": 1}]}', 400),
        ("1", feedback([], []), 400),
        ("1", feedback(["7"], [7]), 400),  # never equal: counted, it would be silently wrong
        ("1", feedback([True], [1]), 400),
        ("1", feedback([[1]], [[1]]), 400),
        ("1", feedback([None], [None]), 400),
        ("1", b"{", 400),
    ],
)
def test_labels_that_cannot_be_compared_are_refused(world, version, body, status):
    found, answer = world().ask("POST", f"/v2/models/m/versions/{version}/feedback", body)
    assert found == status
    assert set(answer) == {"error"}


def test_a_shadow_is_compared_and_never_answers(world):
    server = world(versions={("m", "1", "stable"): Adds(), ("m", "2", "shadow"): Adds(-100.0)})
    assert server.ask("POST", INFER, BODY)[1]["model_version"] == "1"
    (response,), _ = server.send(request("GET", "/metrics"))
    assert 'syncline_shadow_total{model="m",result="agree",process="0"} 1' in response.body.decode()  # the same class
    assert 'syncline_requests_total{model="m",version="1",outcome="ok",process="0"} 1' in response.body.decode()


def test_requests_beyond_the_limit_get_503_and_a_time_to_come_back(world):
    server = world(limits=Limits(requests=2))
    connections = [server.connect() for _ in range(5)]
    for connection, _ in connections:
        connection.data_received(request("POST", INFER, BODY))
    server.settle()
    found = [responses(transport.written)[0] for _, transport in connections]
    assert [one.status for one in found] == [200, 200, 503, 503, 503]
    assert found[-1].headers["retry-after"] == "1"
    assert server.ask("POST", INFER, BODY)[0] == 200


# access


@pytest.mark.parametrize("path", ["/v2", INFER, "/metrics", "/", "/v2/repository/index"])
def test_everything_but_health_needs_the_token(world, path):
    server = world(token=TOKEN)
    method = "POST" if path in (INFER, "/v2/repository/index") else "GET"
    assert server.ask(method, path, BODY)[0] == 401
    assert server.ask(method, path, BODY, Authorization="Bearer wrong")[0] == 401
    (response,), _ = server.send(request(method, path, BODY if path == INFER else b"", Authorization=f"Bearer {TOKEN}"))
    assert response.status == 200
    assert server.ask("GET", "/v2/health/ready")[0] == 200


def test_the_token_in_an_address_opens_the_page_only(world):
    server = world(token=TOKEN)
    (response,), _ = server.send(request("GET", f"/?token={TOKEN}"))
    assert response.status == 200
    assert b"<form" in response.body
    assert server.ask("GET", f"/v2?token={TOKEN}")[0] == 401


def test_without_a_token_other_hosts_and_sites_are_refused(world):
    server = world()
    foreign = request("POST", INFER, BODY).replace(b"Host: localhost:8000", b"Host: evil.example")
    (response,), _ = server.send(foreign)
    assert response.status == 403
    assert server.ask("POST", INFER, BODY, Origin="http://evil.example")[0] == 403
    assert server.ask("POST", INFER, BODY, Origin="http://localhost:8000")[0] == 200


# HTTP


def test_a_large_request_is_refused_by_its_header_before_it_is_sent(world):
    server = world(limits=Limits(body_bytes=100))
    (response,), _ = server.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 101\r\n\r\n" % INFER.encode())
    assert response.status == 413
    chunks = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % INFER.encode()
    (response,), _ = server.send(chunks, b"40\r\n" + b"a" * 64 + b"\r\n", b"40\r\n" + b"a" * 64 + b"\r\n")
    assert response.status == 413


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01 hello", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (request("POST", INFER, BODY, Content_Encoding="gzip"), 415),
    ],
)
def test_what_is_not_served_is_refused_and_the_connection_ends(world, data, status):
    server = world()
    connection, transport = server.connect()
    connection.data_received(data)
    (response,) = responses(transport.written)
    assert response.status == status
    assert response.headers["connection"] == "close"
    connection.data_received(b"more of it")
    assert connection.is_overdue(server.loop.time() + 3)


def test_an_upgrade_is_declined_as_java_clients_expect(world):
    data = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    (response,), transport = world().send(data)
    assert (response.status, response.headers["connection"], transport.is_closed) == (200, "close", True)


def test_a_wrong_request_behind_a_good_one_waits_for_its_turn(world):
    found, _ = world().send(request("POST", INFER, BODY) + b"nonsense\r\n\r\n")
    assert [one.status for one in found] == [200, 400]


def test_a_slow_request_gets_408_and_an_idle_connection_is_closed(world):
    server = world(limits=Limits(receive_s=5, idle_s=20))
    slow, idle = server.connect(), server.connect()
    slow[0].data_received(request("POST", INFER, BODY)[:-1])
    now = server.loop.time()
    assert not slow[0].is_overdue(now + 4)
    assert slow[0].is_overdue(now + 6)
    assert not idle[0].is_overdue(now + 6)
    assert idle[0].is_overdue(now + 21)
    slow[0].close_overdue()
    assert responses(slow[1].written)[0].status == 408


def test_connections_beyond_the_limit_are_closed(world):
    server = world(limits=Limits(connections=1))
    first, second = server.connect(), server.connect()
    assert (first[1].is_closed, second[1].is_closed) == (False, True)
    first[0].connection_lost(None)
    assert not server.connect()[1].is_closed


def test_a_client_that_does_not_read_is_not_read_from(world):
    server = world()
    connection, transport = server.connect()
    connection.pause_writing()
    assert not transport.is_reading
    assert connection.is_overdue(server.loop.time() + 31)
    connection.resume_writing()
    assert transport.is_reading


def test_a_stopping_server_ends_idle_connections_and_answers_the_others(world):
    server = world()
    busy, idle = server.connect(), server.connect()
    busy[0].data_received(request("POST", INFER, BODY))
    server.http.stop()
    assert (busy[1].is_closed, idle[1].is_closed) == (False, True)
    server.settle()
    (response,) = responses(busy[1].written)
    assert (response.status, response.headers["connection"], busy[1].is_closed) == (200, "close", True)
    assert server.ask("GET", "/v2/health/ready") == (503, {"ready": False})


def test_the_access_log_has_a_json_line_per_response_without_the_token(world, tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        server = world(token=TOKEN, log=file.fileno())
        server.send(request("GET", f"/?token={TOKEN}"))
        server.ask("POST", INFER, BODY, Authorization=f"Bearer {TOKEN}")
        server.ask("POST", INFER, BODY)
        server.http.sweep()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["path"], one["status"], one["version"]) for one in lines] == [
        ("/", 200, ""), (INFER, 200, "1"), (INFER, 401, "")
    ]  # fmt: skip
    assert TOKEN not in path.read_text()


def test_metrics_count_requests_and_have_a_help_line_each(world):
    server = world()
    server.ask("POST", INFER, BODY)
    server.ask("GET", "/nowhere")
    (response,), _ = server.send(request("GET", "/metrics"))
    text = response.body.decode()
    assert 'syncline_http_responses_total{status="404",process="0"} 1' in text
    assert 'syncline_request_seconds_count{model="m",process="0"} 1' in text
    names = {line.split("{")[0] for line in text.splitlines() if line and line[0] != "#"}
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert all(any(name.startswith(known) for known in helped) for name in names)


def test_the_openapi_document_has_every_address_that_answers(world):
    server = world()
    document = server.ask("GET", "/v2/openapi.json")[1]
    from openapi_spec_validator import validate

    validate(document)
    example = document["paths"][INFER]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert server.ask("POST", INFER, json.dumps(example).encode())[0] == 200


def body_schema(server, path: str):
    """What the document says about the body of a request."""
    from jsonschema import Draft202012Validator

    document = server.ask("GET", "/v2/openapi.json")[1]
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"rows": [[1, 2], [3, 4.5]]}, 200),
        ({"rows": [[1, 2, 3]]}, 400),
        ({"rows": [[1, "2"]]}, 400),
        ({"rows": [[1, 1e39]]}, 400),
        ({"rows": []}, 400),
        ({"rows": [[1, 2]], "text": "a"}, 400),
        ({"rows": [[1, 2]], "more": 1}, 400),
        ({"text": "a"}, 400),
        ({}, 400),
    ],
)
def test_the_document_says_which_predictions_are_answered(world, body, status):
    server, path = world(), "/v2/models/m/predict"
    assert body_schema(server, path).is_valid(body) == (status == 200)
    assert server.ask("POST", path, json.dumps(body).encode())[0] == status


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 200),
        ({"outputs": [{"name": "y"}]}, 200),
        ({"outputs": [{"name": ""}]}, 400),
        ({"inputs": []}, 400),
        ({"inputs": [{"name": "z", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}, 400),
        ({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "INT8", "data": [1, 2]}]}, 400),
        ({"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}, 400),
        ({"id": 3}, 400),
    ],
)
def test_the_document_has_the_names_and_types_of_the_model(world, change, status):
    server, body = world(), {**json.loads(BODY), **change}
    assert body_schema(server, INFER).is_valid(body) == (status == 200)
    assert server.ask("POST", INFER, json.dumps(body).encode())[0] == status


def test_a_model_with_several_inputs_has_no_prediction_for_people_in_the_document(world):
    engine = Adds()
    engine.signature = Signature((*Adds.signature.inputs, TensorSpec("z", "FP32", (-1, 2))), Adds.signature.outputs)
    paths = world(engine).ask("GET", "/v2/openapi.json")[1]["paths"]
    assert INFER in paths
    assert not [path for path in paths if path.endswith("/predict")]


# models and names


class Mean(Adds):
    def run(self, tensors):
        return [tensors["x"] - tensors["x"].mean(0, keepdims=True)]


def test_a_model_that_mixes_rows_is_found_out():
    assert probe(Adds(), 4) == (True, True)
    assert probe(Mean(), 4)[0] is False


def test_sources_become_models_versions_and_roles():
    def roles(found):
        return [(one.model, one.role) for one in found]

    assert roles(sources_of(["a.onnx", "b.onnx"])) == [("a", "stable"), ("b", "stable")]
    assert roles(sources_of(["a.onnx", "b.onnx"], name="m")) == [("m", "pinned"), ("m", "stable")]
    assert roles(sources_of(["a.onnx", "b.onnx"], name="m", canary=0.1)) == [("m", "stable"), ("m", "canary")]
    assert roles(sources_of(["a.onnx", "b.onnx"], shadow=True)) == [("a", "stable"), ("a", "shadow")]


@pytest.mark.parametrize(
    ("arguments", "options", "code"),
    [
        ([], {}, "nothing-to-serve"),
        (["a.onnx"], {"canary": 0.1}, "two-sources"),
        (["a.onnx", "b.onnx"], {"canary": 0.1, "shadow": True}, "two-roles"),
        (["x/a.onnx", "y/a.onnx"], {}, "same-name"),
        (["a.onnx"], {"name": "a/b"}, "invalid-setting"),
    ],
)
def test_sources_that_make_no_sense_are_refused(arguments, options, code):
    with pytest.raises(ConfigError) as raised:
        sources_of(arguments, **options)
    assert raised.value.code == code


@pytest.mark.parametrize("text", ["0", "100%", "-1%", "ten", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(ConfigError):
        read_share(text)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"host": "0.0.0.0"}, "open-to-others"),
        ({"processes": 0}, "invalid-setting"),
        ({"max_batch": 0}, "invalid-setting"),
        ({"max_requests": 0}, "invalid-setting"),
        ({"follow": True}, "nothing-to-follow"),
        ({"tls_cert": "cert.pem"}, "half-tls"),
        ({"tls_cert": "cert.pem", "tls_key": "key.pem"}, "bad-tls"),
        ({"access_log": "/nowhere/log"}, "access-log"),
        ({"what": ("missing.onnx",)}, "no-model-file"),
        ({"what": ("missing",)}, "unknown-name"),
    ],
)
def test_options_that_cannot_be_served_are_refused_before_anything_starts(tmp_path, options, code):
    file = tmp_path / "m.onnx"
    file.touch()
    with pytest.raises(ConfigError) as raised:
        make_server(ServeOptions(**{"what": (str(file),), **options}), print)
    assert raised.value.code == code


def test_a_port_that_is_taken_is_named(tmp_path):
    file = tmp_path / "m.onnx"
    file.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as raised:
        make_server(ServeOptions(what=(str(file),), port=taken.getsockname()[1]), print)
    assert raised.value.code == "port-taken"


@pytest.mark.parametrize("text", ["short", "has a space in it, really", "", "ümlaut-is-not-ascii-enough"])
def test_a_token_that_is_weak_or_no_header_is_refused(tmp_path, text):
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as raised:
        token_of(file)
    assert raised.value.code == "bad-token"


def test_a_token_comes_from_a_file_or_is_new(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert token_of(file) == TOKEN
    assert token_of(None) != token_of(None)
