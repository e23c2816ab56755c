"""Who may ask the live page's server for what, without a browser."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from report_runs import nobody, progress, started, whole_run, write_run

from syncline.errors import ConfigError
from syncline.observe.live import server as live_server
from syncline.observe.live.follow import Follower
from syncline.observe.live.server import WatchServer
from syncline.telemetry.events import to_line
from syncline.telemetry.run_dir import RunDir


@contextmanager
def serving(run: Path, stop=lambda: None, is_live=nobody) -> Iterator[WatchServer]:
    with closing(WatchServer(Follower(RunDir(run), is_live), stop)) as server:
        thread = threading.Thread(target=server.serve, name="syncline-watch-test")
        thread.start()
        try:
            yield server
        finally:
            server.shut_down()
            thread.join()


def ask(server: WatchServer, method: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def test_without_the_token_every_request_is_refused(tmp_path):
    stopped = []
    with serving(write_run(tmp_path / "run", whole_run()), lambda: stopped.append(1)) as server:
        for method, path in (("GET", "/"), ("GET", "/?token=wrong"), ("GET", "/update"), ("POST", "/stop")):
            status, body, _ = ask(server, method, path)
            assert status == 403
            assert b"lenet" not in body
        in_address = ask(server, "POST", f"/stop?token={server.token}")  # what a form of another site could send
        assert in_address[0] == 403
    assert not stopped


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
def test_another_site_is_refused_even_with_the_token(tmp_path, headers):
    stopped = []
    with serving(write_run(tmp_path / "run", whole_run()), lambda: stopped.append(1)) as server:
        assert ask(server, "GET", f"/?token={server.token}", **headers)[0] == 403
        assert ask(server, "POST", "/stop", X_Syncline_Token=server.token, **headers)[0] == 403
    assert not stopped


def test_with_the_token_the_page_is_there_and_may_not_be_framed_or_kept(tmp_path):
    with serving(write_run(tmp_path / "run", whole_run())) as server:
        status, body, headers = ask(server, "GET", f"/?token={server.token}")
        assert status == 200
        assert b"lenet on digits" in body
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert ask(server, "GET", "/events.jsonl")[0] == 404
        assert ask(server, "POST", "/workers", X_Syncline_Token=server.token)[0] == 404


def test_an_update_is_sent_once_and_an_incomplete_line_is_none(tmp_path):
    run = write_run(tmp_path / "run", [started()])
    with serving(run) as server:
        _, body, headers = ask(server, "GET", "/update", X_Syncline_Token=server.token)
        assert json.loads(body)["status"] == "crashed"
        tag = headers["ETag"]
        assert ask(server, "GET", "/update", X_Syncline_Token=server.token, If_None_Match=tag)[0] == 304
        line = to_line(progress(1)) + b"\n"
        with (run / "events.jsonl").open("ab") as file:
            file.write(line[:20])
            file.flush()
            assert ask(server, "GET", "/update", X_Syncline_Token=server.token, If_None_Match=tag)[0] == 304
            file.write(line[20:])
        status, body, _ = ask(server, "GET", "/update", X_Syncline_Token=server.token, If_None_Match=tag)
        assert status == 200
        assert "step 1 of 30" in json.loads(body)["heading"]


def test_a_run_that_is_not_live_cannot_be_stopped(tmp_path):
    def refuse() -> None:
        raise ConfigError("not under way")

    with serving(write_run(tmp_path / "run", whole_run()), refuse) as server:
        assert ask(server, "POST", "/stop", X_Syncline_Token=server.token)[0] == 409


def test_a_port_that_is_taken_is_named(tmp_path):
    run = write_run(tmp_path / "run", [])
    with serving(run) as server, pytest.raises(ConfigError, match=str(server.port)):
        WatchServer(Follower(RunDir(run), nobody), lambda: None, server.port)


def test_a_run_that_begins_anew_is_followed_from_its_beginning(tmp_path):
    run = write_run(tmp_path / "run", whole_run())
    follower = Follower(RunDir(run), nobody)
    follower.refresh()
    assert follower.record.state.step == 30
    (run / "events.jsonl").write_bytes(to_line(started()) + b"\n")
    follower.refresh()
    assert follower.record.state.step == 0


def test_a_browser_that_drops_its_connection_is_not_worth_a_word(tmp_path, monkeypatch, capfd):
    def dropped(self):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(WatchServer, "page", dropped)
    with serving(write_run(tmp_path / "run", whole_run())) as server:
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(server, "GET", f"/?token={server.token}")
        assert ask(server, "GET", "/update", X_Syncline_Token=server.token)[0] == 200
    assert capfd.readouterr().err == ""


def test_what_is_no_address_is_refused(tmp_path, capfd):
    with serving(write_run(tmp_path / "run", whole_run())) as server:
        for method, status in ((b"GET", b"400"), (b"POST", b"404")):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
                connection.sendall(method + b" http://[ HTTP/1.0\r\n\r\n")
                assert connection.recv(100).split()[1] == status
    assert capfd.readouterr().err == ""


def test_clients_that_say_nothing_hold_few_threads_and_the_page_is_there_again_when_they_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(live_server, "_MOST_REQUESTS", 3)
    with serving(write_run(tmp_path / "run", whole_run())) as server:
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3)]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as one_too_many:
            assert one_too_many.recv(1) == b"", "it is closed at once"
        for silent in held:
            silent.close()
        deadline = time.monotonic() + 10
        while (status := status_of_page(server)) is None:
            assert time.monotonic() < deadline, "those that left are still counted"
        assert status == 200


def status_of_page(server: WatchServer) -> int | None:
    """None if the server hangs up."""
    try:
        return ask(server, "GET", f"/?token={server.token}")[0]
    except (ConnectionError, http.client.HTTPException):
        return None
