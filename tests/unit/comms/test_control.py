"""The control channel: who has the key gets through, nobody else, and nothing but messages is understood."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from syncline.comms.control import (
    Abort,
    ControlClient,
    ControlServer,
    Events,
    Failed,
    Finished,
    FromWorker,
    Hello,
    LaunchSpec,
    LedgerLine,
    NewView,
    Ready,
    Release,
    RunFiles,
    Stop,
    StoreAddress,
    StoreRequest,
    ToWorker,
    ViewOf,
    Welcome,
)

LIMIT_S = 30.0

VIEW = ViewOf(3, [0, 2, 5], "/proc/1/fd/3#syncline-control-1f2e")
FROM_WORKER: list[FromWorker] = [
    Hello(1, 4711),
    Ready(1, 2),
    LedgerLine(1, b'{"type":"closed"}'),
    Events(1, 7, [{"kind": "step", "loss": 0.5, "nested": {"list": [1, None, "x"]}}]),
    Events(1, 8, []),
    StoreRequest(1),
    Finished(1, True, {"test/accuracy": 0.97}),
    Failed(1, "ValueError", "lr is -1", "Traceback ...", 3, [5, 6], False),
]
FILES = RunFiles(task_path="/run/task", run_dir="/run", checkpoint_path=None)
TO_WORKER: list[ToWorker] = [
    Welcome({"seed": 0}, FILES, VIEW, 4242, ["/home/me"], "/home/me", "secret", "5e55"),
    Welcome({"seed": 0}, FILES, None, 4242, ["/home/me"], "/home/me", "secret", "5e55"),
    NewView(VIEW),
    Release(),
    StoreAddress("127.0.0.1", 29500),
    Stop(),
    Abort("worker 2 was killed"),
]


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1")
    yield server
    server.close()


@contextmanager
def joined(spec: LaunchSpec) -> Iterator[ControlClient]:
    client = ControlClient(spec)
    try:
        yield client
    finally:
        client._dealer._socket.linger = 0  # a message that was never taken must not hold up the test
        client.close()


def next_message(server: ControlServer) -> FromWorker | None:
    assert server.socket.poll(int(LIMIT_S * 1000)), "no message came"
    return server.receive()


def foreign(spec: LaunchSpec, **changes: str) -> LaunchSpec:
    return msgspec.structs.replace(spec, **changes)


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda m: type(m).__name__)
def test_what_a_worker_sends_arrives_as_it_was(server, message):
    with joined(server.launch_spec(1)) as client:
        client.send(message)
        assert next_message(server) == message


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_what_the_coordinator_sends_arrives_as_it_was(server, message):
    with joined(server.launch_spec(1)) as client:
        client.send(Hello(1, 1))
        next_message(server)
        server.send(1, message)
        assert client.receive(LIMIT_S) == message


def test_each_worker_gets_its_own_messages_in_order(server):
    with joined(server.launch_spec(0)) as zero, joined(server.launch_spec(1)) as one:
        for worker_id, client in enumerate((zero, one)):
            client.send(Hello(worker_id, 1))
            next_message(server)
        for number in range(20):
            server.send(number % 2, Abort(str(number)))
        assert [zero.receive(LIMIT_S) for _ in range(10)] == [Abort(str(n)) for n in range(0, 20, 2)]
        assert [one.receive(LIMIT_S) for _ in range(10)] == [Abort(str(n)) for n in range(1, 20, 2)]


def test_nobody_sent_anything_is_none_and_not_an_error(server):
    assert server.receive() is None
    with joined(server.launch_spec(0)) as client:
        assert client.receive(0.0) is None


def test_a_message_to_a_worker_that_is_gone_or_never_came_is_no_error(server):
    server.send(5, Stop())
    with joined(server.launch_spec(0)) as client:
        client.send(Hello(0, 1))
        next_message(server)
    server.send(0, Stop())


def test_a_replacement_takes_the_place_of_a_worker_that_is_gone(server):
    for pid in range(5):
        with joined(
            server.launch_spec(0)
        ) as worker:  # at once, perhaps before the server has noticed the end of the last
            worker.send(Hello(0, pid))
            assert next_message(server) == Hello(0, pid)
            server.send(0, Abort(str(pid)))
            assert worker.receive(LIMIT_S) == Abort(str(pid))


def test_a_launch_spec_survives_json(server):
    spec = server.launch_spec(3)
    assert spec.worker_id == 3
    assert msgspec.json.decode(msgspec.json.encode(spec), type=LaunchSpec) == spec


def test_the_server_listens_on_the_given_host_only(server):
    assert server.address.startswith("tcp://127.0.0.1:")
    assert server.socket.last_endpoint.rstrip(b"\0") == server.address.encode()


def strangers(spec: LaunchSpec) -> dict[str, LaunchSpec]:
    """Launch specs that are almost right."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return {
        "a key pair of their own": foreign(spec, public_key=public, secret_key=secret),
        "the right public key without its secret": foreign(spec, secret_key=secret),
        "another server in mind": foreign(spec, server_key=public),
    }


@pytest.mark.parametrize(
    "who", ["a key pair of their own", "the right public key without its secret", "another server in mind"]
)
def test_who_has_the_wrong_key_never_gets_through(server, who):
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILURES
    monitor = server.socket.get_monitor_socket(events)
    try:
        with joined(strangers(server.launch_spec(1))[who]) as stranger:
            stranger.send(Hello(1, 666))
            assert next_event(monitor) & FAILURES
            assert server.receive() is None
            with joined(server.launch_spec(2)) as worker:  # the right one still does
                worker.send(Hello(2, 1))
                assert next_message(server) == Hello(2, 1)
            server.send(1, Stop())
            assert stranger.receive(0.0) is None
            assert server.receive() is None
    finally:
        server.socket.disable_monitor()
        monitor.close()


def test_who_has_no_key_at_all_never_gets_through(server):
    monitor = server.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILURES)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    try:
        stranger.connect(server.address)
        stranger.send(msgspec.msgpack.encode(Hello(1, 666)))
        assert next_event(monitor) & FAILURES
        assert server.receive() is None
    finally:
        stranger.close()
        context.term()
        server.socket.disable_monitor()
        monitor.close()


FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def next_event(monitor: zmq.Socket[bytes]) -> int:
    assert monitor.poll(int(LIMIT_S * 1000)), "no attempt to join was noticed"
    return int(recv_monitor_message(monitor)["event"])


def nested(depth: int) -> bytes:
    """Events whose one event is a list in a list in a list."""
    head, nothing, tail = msgspec.msgpack.encode(Events(0, 0, [{"x": None}])).partition(b"\xc0")
    assert nothing
    return head + b"\x91" * depth + nothing + tail


GARBAGE = {
    "nothing": [b""],
    "noise": [b"\x00\xff\xfe\x80garbage"],
    "text": [b"hello"],
    "a pickle": [b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00."],
    "a message to the worker": [msgspec.msgpack.encode(Stop())],
    "an unknown kind": [msgspec.msgpack.encode({"type": "Sudo", "worker_id": 0})],
    "a missing field": [msgspec.msgpack.encode({"type": "Hello", "worker_id": 0})],
    "a wrong type": [msgspec.msgpack.encode({"type": "Hello", "worker_id": "zero", "pid": 1})],
    "a message cut short": [msgspec.msgpack.encode(Hello(0, 1))[:-1]],
    "a message with more behind it": [msgspec.msgpack.encode(Hello(0, 1)) + b"x"],
    "two parts": [msgspec.msgpack.encode(Hello(0, 1)), b"more"],
    "text that is no text": [msgspec.msgpack.encode({"type": "Failed", "kind": "xx"}).replace(b"xx", b"\xff\xfe")],
    "a nest too deep": [nested(100_000)],
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_from_a_worker_with_the_right_key_is_ignored(server, what):
    with joined(server.launch_spec(0)) as client:
        client._dealer._socket.send_multipart(GARBAGE[what])
        client.send(Hello(0, 7))
        assert next_message(server) is None
        assert next_message(server) == Hello(0, 7)


def test_closing_leaves_no_thread_and_frees_the_port():
    before = set(threading.enumerate())
    server = ControlServer("127.0.0.1")
    with joined(server.launch_spec(0)) as client:
        client.send(Hello(0, 1))
        next_message(server)
        server.send(0, Stop())
        server.close()
    assert set(threading.enumerate()) == before
    with zmq.Context() as context, context.socket(zmq.ROUTER) as again:
        again.bind(server.address)


def test_every_server_has_keys_of_its_own():
    one, other = ControlServer("127.0.0.1"), ControlServer("127.0.0.1")
    try:
        with joined(foreign(one.launch_spec(0), address=other.address)) as stranger:
            monitor = other.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILURES)
            stranger.send(Hello(0, 1))
            assert next_event(monitor) & FAILURES
            other.socket.disable_monitor()
            monitor.close()
    finally:
        one.close()
        other.close()
