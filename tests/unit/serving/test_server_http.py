"""The server without a socket: who may ask, bytes of HTTP, the access log and metrics."""

from __future__ import annotations

import json

import pytest
from server_world import BODY, INFER, TOKEN, request, responses

from syncline.serving.server.limits import Limits

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
