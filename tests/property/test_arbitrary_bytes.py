"""Whatever bytes arrive, from strangers or from workers with a bug: connections end, servers go on."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import generators  # noqa: F401  # loads the profile of these tests
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comms import framing
from syncline.comms.control import ControlClient, ControlServer, Events, Failed, Finished, FromWorker, Hello
from syncline.comms.listener import Disconnected, Frame, ServerConnection, listen
from syncline.comms.parameter_server import messages as m

pytestmark = pytest.mark.xdist_group("arbitrary_bytes")  # one process, because these tests share a fixture

SECRET = b"s" * 32
LIMIT_S = 20.0

chunks = st.lists(st.binary(max_size=200), max_size=6)
words = st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | words | st.binary(max_size=8)
things = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.integers(0, 9), inner, max_size=4),
    max_leaves=8,
)
to_server: st.SearchStrategy[m.FromWorker] = st.sampled_from(
    [m.Tick(3), m.Pull(1, 0, [(0, 2)]), m.Gate(4, 2, 1), m.SaveState(5), m.Offer(7, "/proc/1/fd/1", b"t", 8)]
)
to_coordinator: st.SearchStrategy[FromWorker] = st.sampled_from(
    [
        Hello(0, 1),
        Events(0, 3, [{"kind": "WorkerProgress", "loss": 0.5}]),
        Finished(0, False, {"test/accuracy": 0.5}),
        Failed(0, "ValueError", "why", "Traceback", 3, [1, 2], False),
    ]
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes are others, some are missing, some are twice there."""
    damage = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(damage)))
        damage[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(damage)


encode = msgspec.msgpack.encode


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """What a worker with a bug may send to a server of parameters: frames, almost."""
    message = draw(
        st.one_of(
            st.binary(max_size=100),
            to_server.map(encode).flatmap(damaged),
            things.map(encode),
        )
    )
    length = draw(st.one_of(st.just(len(message)), st.integers(0, 2**32 - 1)))
    bulk = draw(st.one_of(st.integers(0, 100), st.integers(2**45, 2**64 - 1)))  # never what a machine could provide
    prefix = struct.pack("<IQ?51x", length, bulk, draw(st.booleans()))
    return draw(damaged(prefix)) + message.ljust(draw(st.sampled_from([64, 128])), b"\0")


@contextmanager
def peer_and_stranger() -> Iterator[tuple[ServerConnection[m.FromWorker], socket.socket, list[bytes]]]:
    """A server's end, the other one, and what the server's end has decoded."""
    decoded: list[bytes] = []

    def decode(data: memoryview) -> m.FromWorker:
        decoded.append(bytes(data))
        return m.decode_from_worker(data)

    with listen("127.0.0.1") as listener:
        stranger = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
        accepted, _ = listener.accept()
    peer = ServerConnection(accepted, SECRET, decode)
    try:
        peer.flush()
        yield peer, stranger, decoded
    finally:
        peer.close()
        stranger.close()


def take(peer: ServerConnection[m.FromWorker], data: bytes, stranger: socket.socket) -> list[Frame[m.FromWorker]]:
    """What the server makes of `data`; it ends in `Disconnected`, because the stranger leaves after it."""
    found = []
    stranger.sendall(data)
    stranger.shutdown(socket.SHUT_WR)
    try:
        while True:
            frame = peer.read()
            if frame is not None:
                found.append(frame)
    except Disconnected:
        return found


def received(stranger: socket.socket) -> bytes:
    data = b""
    try:
        while more := stranger.recv(4096):
            data += more
    except ConnectionResetError:
        pass
    return data


@given(chunks)
def test_a_stranger_gets_nothing_decoded_and_nothing_but_a_challenge(data):
    with peer_and_stranger() as (peer, stranger, decoded):
        assert take(peer, b"".join(data), stranger) == []
        assert decoded == []
        assert not peer.is_authenticated
        peer.close()
        assert len(received(stranger)) <= 32


@given(st.lists(frames(), max_size=4))
def test_a_worker_with_a_bug_loses_its_connection_and_the_server_nothing(data):
    with peer_and_stranger() as (peer, stranger, _):
        challenge, own = stranger.recv(32), os.urandom(32)
        stranger.sendall(own + framing.proof(SECRET, b"worker", challenge, own))
        for frame in take(peer, b"".join(data), stranger):
            assert isinstance(frame.message, msgspec.Struct)
            assert frame.bulk.numel() <= 100
        assert peer.is_authenticated


@pytest.fixture(scope="module")
def line() -> Iterator[tuple[ControlServer, ControlClient]]:
    """A control channel whose worker's end sends anything."""
    server = ControlServer("127.0.0.1")
    client = ControlClient(server.launch_spec(0))
    yield server, client
    client._dealer._socket.linger = 0
    client.close()
    server.close()


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=300),
            things.map(encode),
            to_coordinator.map(msgspec.msgpack.encode).flatmap(damaged),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_the_coordinator_takes_or_ignores_whatever_a_worker_sends(line, parts):
    server, client = line
    client._dealer._socket.send_multipart(parts)
    client.send(Hello(7, 4711))
    for _ in range(2):
        assert server.socket.poll(int(LIMIT_S * 1000)), "the message did not arrive"
        message = server.receive()
        assert message is None or isinstance(message, msgspec.Struct)
    assert message == Hello(7, 4711)
    assert server.receive() is None
