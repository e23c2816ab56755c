"""The server without a socket: the protocol, versions and their labels."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_world import BODY, INFER, Adds, World, request, responses

from syncline.serving.server.catalog import Withdrawn
from syncline.serving.server.limits import Limits


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
