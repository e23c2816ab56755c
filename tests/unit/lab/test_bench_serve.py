"""`syncline bench serve` and `serve-load`: requests of the protocol, a client that times answers, slow clients."""

from __future__ import annotations

import http.server
import socket
import threading

import numpy as np
import pytest

from syncline.errors import SynclineError
from syncline.lab.bench.load import LoadClient, percentile
from syncline.lab.bench.serve_load import slow_clients
from syncline.lab.bench.served_lenet import PING, binary_request, images, json_request
from syncline.serving.server.messages import parse_request
from syncline.serving.server.signature import Signature, TensorSpec

LENET = Signature((TensorSpec("input", "UINT8", (-1, 1, 28, 28)),), (TensorSpec("logits", "FP32", (-1, 10)),))


@pytest.mark.parametrize("make", [binary_request, json_request])
def test_both_kinds_of_request_send_the_same_image(make):
    head, _, body = make().partition(b"\r\n\r\n")
    size = head.partition(b"Inference-Header-Content-Length: ")[2].split(b"\r\n")[0]
    found = parse_request(body, int(size) if size else None, LENET)
    assert np.array_equal(found.tensors["input"], images())
    assert found.outputs == (("logits", bool(size)),)


class Refuses(http.server.BaseHTTPRequestHandler):
    """Answers 200 and 503 in turn, in two pieces."""

    protocol_version = "HTTP/1.1"
    count, delay_s = 0, 0.0

    def do_GET(self):
        Refuses.count += 1
        threading.Event().wait(self.delay_s)
        self.send_response(200 if Refuses.count % 2 else 503)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.flush()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


@pytest.fixture
def port():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def test_a_load_client_counts_every_answer_with_its_status_and_time(port):
    with LoadClient(port, PING, 3) as client:
        closed = client.ask(20)
        opened = client.ask_at(500.0, 0.1)
        with pytest.raises(SynclineError):
            client.ask_all(2)
    assert sorted(closed.statuses) == [200] * 10 + [503] * 10
    assert len(closed.times(200)) == 10
    assert len(opened.statuses) == 50
    assert opened.took_s >= 49 / 500
    assert all(0 < seconds < closed.took_s for seconds in closed.seconds)
    late = opened.times(200, 0.05) + opened.times(503, 0.05)
    assert 0 < len(late) < 50  # without those of the first part


def test_a_load_client_that_cannot_keep_up_says_so(port, monkeypatch):
    monkeypatch.setattr(Refuses, "delay_s", 0.4)
    with LoadClient(port, PING, 1) as client, pytest.raises(SynclineError) as raised:
        client.ask_at(100, 0.04)  # one connection can have two or three answers in a second
    assert raised.value.code == "client-too-slow"


def test_slow_clients_come_back_when_they_are_thrown_out():
    with socket.create_server(("127.0.0.1", 0)) as listener, slow_clients(listener.getsockname()[1], 3):
        first = [listener.accept()[0] for _ in range(3)]
        for one in first:
            one.close()
        again = [listener.accept()[0] for _ in range(3)]
        for one in again:
            one.close()


def test_a_percentile_is_a_value_that_occurred():
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([5.0], 0.99) == 5.0
    with pytest.raises(SynclineError):
        percentile([], 0.99)
