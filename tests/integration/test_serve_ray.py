"""`syncline serve --engine ray`: a deployment of Ray Serve on a cluster of this machine, asked by real clients."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.http as triton
from serving_models import adds, two_outputs

import syncline

pytest.importorskip("ray.serve", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve-ray")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = [adds(folder / "m.onnx", 1.0), two_outputs(folder / "two.onnx")]
    with syncline.serve(*paths, engine="ray", processes=2) as found:
        yield found


def ask(server, path: str, body: bytes | None = None, token: str | None = None):
    headers = {"Authorization": f"Bearer {token or server.token}"}
    request = urllib.request.Request(f"{server.url}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_protocols_clients_work_with_replicas(server):
    headers = {"Authorization": f"Bearer {server.token}"}
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    try:
        assert client.is_server_ready(headers=headers)
        x, n = np.ones((2, 3), np.float32), np.arange(6, dtype=np.int64).reshape(2, 3)
        inputs = [triton.InferInput("x", x.shape, "FP32"), triton.InferInput("n", n.shape, "INT64")]
        for one, array in zip(inputs, (x, n), strict=True):
            one.set_data_from_numpy(array)
        wanted = [triton.InferRequestedOutput("product")]
        found = client.infer("two", inputs, outputs=wanted, headers=headers)
        assert np.array_equal(found.as_numpy("product"), x * n)
    finally:
        client.close()
    assert server.predict([[1, 2, 3, 4]], model="m").tolist() == [[2, 3, 4, 5]]
    assert server.models() == ["m", "two"]


def test_what_is_wrong_gets_the_protocols_error(server):
    assert ask(server, "/v2/models/m", token="wrong")[0] == 401
    for path, body, status in [
        ("/v2/models/m/infer", b"{", 400),
        ("/v2/models/other/infer", b"{}", 404),
        ("/v2/models/m/versions/9", None, 404),
        ("/v2/models/m/infer", None, 405),
        ("/v2/repository/models/m/load", b"", 400),  # replicas keep the models with which they started
    ]:
        found, answer = ask(server, path, body)
        assert found == status
        assert set(json.loads(answer)) == {"error"}


def test_a_replica_that_is_killed_is_replaced_while_the_other_one_answers(server):
    def replica() -> int:
        """The process of the replica that answers this request."""
        return int(re.search(r'process="(\d+)"', ask(server, "/metrics")[1])[1])

    victim = replica()
    os.kill(victim, signal.SIGKILL)
    statuses = [ask(server, "/v2/models/m/infer", REQUEST)[0] for _ in range(50)]
    assert statuses[-20:] == [200] * 20
    assert statuses.count(200) >= 45  # those that were on their way to it get an error of Ray's proxy
    assert replica() != victim


REQUEST = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0] * 4}]}).encode()
