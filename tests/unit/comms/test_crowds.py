"""A thousand who connect and say nothing, too much, or nonsense: there is time for the workers all the same."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from syncline.comms import zmq_sockets
from syncline.comms.control import ControlClient, ControlServer, Failed, FromWorker, Hello, Stop
from syncline.comms.parameter_server.client import ParameterServers
from syncline.comms.parameter_server.server import serve

SECRET = b"s" * 32
LIMIT_S = 20.0
GREETING_BYTES = 64  # of ZeroMQ: its version, and that it wants keys


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    """Enough for a crowd and those who bear it, all in this process; afterwards as many as before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def control_server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1")
    yield server
    server.close()


@contextlib.contextmanager
def crowd(port: int, count: int = 1000) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)) for _ in range(count)
        ]


@contextlib.contextmanager
def joined(server: ControlServer, worker_id: int) -> Iterator[ControlClient]:
    client = ControlClient(server.launch_spec(worker_id))
    try:
        yield client
    finally:
        client._dealer._socket.linger = 0
        client.close()


@contextlib.contextmanager
def parameter_server(size: int) -> Iterator[str]:
    ready, over, addresses = threading.Event(), threading.Event(), []

    def run() -> None:
        def on_ready(address: str) -> None:
            addresses.append(address)
            ready.set()

        serve("127.0.0.1", SECRET, shard_index=0, shards=1, size=size, on_ready=on_ready, should_stop=over.is_set)

    thread = threading.Thread(target=run, daemon=True, name="syncline-test-server")
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        yield addresses[0]
    finally:
        over.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def next_message(server: ControlServer) -> FromWorker | None:
    assert server.socket.poll(int(LIMIT_S * 1000)), "no message came"
    return server.receive()


def heard(stranger: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := stranger.recv(4096):
            data += more
    return data


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_thousand_half_open_connections_hold_up_no_worker_of_a_server():
    with parameter_server(size=1) as address:
        before = descriptors()
        with crowd(port_of(address)), ParameterServers([address], SECRET, rank=0, size=1, timeout_s=LIMIT_S) as worker:
            parameter = nn.Parameter(torch.zeros(6))
            worker.begin([parameter], torch.optim.SGD([parameter], lr=1.0), rule="apply")
            out = torch.empty(6)
            start = time.monotonic()
            for _ in range(20):
                worker.push(torch.ones(6), weight=1.0)
                worker.pull(out)
            assert out.tolist() == [-20.0] * 6
            assert time.monotonic() - start < LIMIT_S / 4
            assert descriptors() - before < 1000 + 300, "the server keeps only so many of them"


def test_a_thousand_half_open_connections_hold_up_no_message_to_the_coordinator(control_server):
    with joined(control_server, 0) as early, crowd(port_of(control_server.address)) as strangers:
        with joined(control_server, 1) as late:
            for worker_id, client in enumerate((early, late)):
                client.send(Hello(worker_id, 1))
                assert next_message(control_server) == Hello(worker_id, 1)
                control_server.send(worker_id, Stop())
                assert client.receive(LIMIT_S) == Stop()
        strangers[0].settimeout(LIMIT_S)
        assert len(strangers[0].recv(4096)) <= GREETING_BYTES


def test_who_does_not_finish_the_handshake_with_the_coordinator_is_cut_off(monkeypatch):
    assert zmq_sockets._HANDSHAKE_MS <= 10_000
    monkeypatch.setattr(zmq_sockets, "_HANDSHAKE_MS", 200)
    server = ControlServer("127.0.0.1")
    try:
        with crowd(port_of(server.address), 20) as strangers:
            for number, stranger in enumerate(strangers):
                stranger.sendall(os.urandom(number))
            assert all(len(heard(stranger)) <= GREETING_BYTES for stranger in strangers)
    finally:
        server.close()


def test_a_message_that_is_too_long_is_not_taken_and_the_worker_is_heard_again(control_server):
    with joined(control_server, 0) as client:
        client.send(Hello(0, 1))
        assert next_message(control_server) == Hello(0, 1)
        client.send(Failed(0, "ValueError", "x" * (zmq_sockets._LONGEST_MESSAGE + 1), "", 0, [], False))
        deadline = time.monotonic() + LIMIT_S
        message = None
        while message is None and time.monotonic() < deadline:
            client.send(Hello(0, 2))  # what was underway with the long one is lost too
            if control_server.socket.poll(50):
                message = control_server.receive()
        assert message == Hello(0, 2)


def test_a_process_of_a_run_may_have_as_many_descriptors_as_the_system_allows():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 500), most))
    server = ControlServer("127.0.0.1")
    server.close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(most, zmq_sockets._MOST_DESCRIPTORS), most)
