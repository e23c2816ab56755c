"""What the server remembers of earlier requests never changes an answer: `KnownHeads` and `BinaryPlans`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.serving.server.app import HttpRequest
from syncline.serving.server.binary_plan import BinaryPlans
from syncline.serving.server.known_heads import KnownHeads
from syncline.serving.server.messages import encode_response, parse_request
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.signature import Signature, TensorSpec

HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 3\r\n\r\n"
TWO = Signature((TensorSpec("x", "FP32", (-1, 2)), TensorSpec("n", "INT64", (-1,))), (TensorSpec("y", "FP32", (-1,)),))


def known(headers: dict[bytes, bytes]) -> KnownHeads:
    heads = KnownHeads()
    heads.remember(HEAD + b"abc", HttpRequest(b"POST", b"/v2/models/m/infer", headers, b"abc"))
    return heads


def test_a_known_head_gives_the_request_with_its_own_body():
    found = known({b"content-length": b"3"}).request_in(HEAD + b"xyz")
    assert found is not None
    assert (found.method, found.target, found.body) == (b"POST", b"/v2/models/m/infer", b"xyz")


@pytest.mark.parametrize("data", [HEAD, HEAD + b"ab", HEAD + b"abcG", HEAD[:-1], b"", b" " + HEAD + b"abc"])
def test_anything_but_exactly_one_request_goes_to_the_parser(data):
    assert known({b"content-length": b"3"}).request_in(data) is None


@pytest.mark.parametrize("header", [b"transfer-encoding", b"expect"])
def test_heads_whose_body_does_not_follow_plainly_are_not_remembered(header):
    assert known({b"content-length": b"3", header: b"x"}).request_in(HEAD + b"abc") is None


def request_of(x: np.ndarray, n: np.ndarray) -> tuple[bytes, int]:
    inputs = [
        {"name": name, "shape": a.shape, "datatype": kind, "parameters": {"binary_data_size": a.nbytes}}
        for name, a, kind in (("n", n, "INT64"), ("x", x, "FP32"))
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + n.tobytes() + x.tobytes(), len(head)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2**31)), min_size=1, max_size=8))
def test_requests_and_responses_with_plans_equal_those_without(sizes):
    plans = BinaryPlans()
    for rows, seed in sizes:
        random = np.random.default_rng(seed)
        x, n = random.standard_normal((rows, 2)).astype(np.float32), random.integers(0, 9, rows)
        body, size = request_of(x, n)
        plain, planned = parse_request(body, size, TWO), parse_request(body, size, TWO, plans)
        assert list(planned.tensors) == list(plain.tensors)
        assert np.array_equal(planned.tensors["x"], x)
        assert np.array_equal(planned.tensors["n"], n)
        answer = {"y": x[:, 0].copy()}
        assert encode_response(planned, "m", "1", answer) == encode_response(plain, "m", "1", answer)


def test_known_json_with_another_number_of_bytes_is_refused_as_before():
    plans, (body, size) = BinaryPlans(), request_of(np.zeros((1, 2), np.float32), np.zeros(1, np.int64))
    parse_request(body, size, TWO, plans)
    with pytest.raises(RequestRefused) as raised:
        parse_request(body[:-1], size, TWO, plans)
    assert raised.value.code == "wrong-size"


def test_strings_are_never_answered_with_the_size_of_others():
    plans, (body, size) = BinaryPlans(), request_of(np.zeros((1, 2), np.float32), np.zeros(1, np.int64))
    for text in ("a", "longer"):
        request = parse_request(body, size, TWO, plans)
        answered, json_size = encode_response(request, "m", "1", {"y": np.array([text], object)})
        sizes = json.loads(answered[:json_size])["outputs"][0]["parameters"]["binary_data_size"]
        assert sizes == len(answered) - json_size
