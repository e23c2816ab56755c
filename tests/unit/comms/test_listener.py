"""The door of a server: strangers cost little and keep nobody out, and what was recorded opens it to nobody."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from syncline.comms import framing
from syncline.comms import listener as listening
from syncline.comms.listener import Listener, ServerConnection, listen
from syncline.comms.parameter_server import messages as m

SECRET = b"s" * 32
LIMIT_S = 20.0
CHALLENGE_BYTES = 32


class Servant:
    """What a server's loop does with its door, step by step."""

    def __init__(self, listener: socket.socket, room: int = 8) -> None:
        self.address = listener.getsockname()
        self.selector = selectors.DefaultSelector()
        self.listener = Listener(listener, SECRET, m.decode_from_worker, self.selector, max_unauthenticated=room)
        self.admitted: list[ServerConnection[m.FromWorker]] = []

    def turn(self, timeout_s: float = 0.0) -> int:
        """Once round the loop; how many there were to attend to."""
        ready = self.selector.select(timeout_s)
        for key, _ in ready:
            if key.data is self.listener:
                self.listener.accept()
            elif self.listener.admit(key.data):
                self.admitted.append(key.data)
                self.selector.unregister(key.data)
        self.listener.maintain()
        return len(ready)

    def until(self, condition) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            self.turn(0.01)

    @property
    def strangers(self) -> int:
        return len(self.listener._unauthenticated)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as listener:
        yield listener


@pytest.fixture
def servant(listener) -> Iterator[Servant]:
    servant = Servant(listener)
    yield servant
    servant.listener.close()
    for peer in servant.admitted:
        peer.close()
    servant.selector.close()


@pytest.fixture
def crowd() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def knock(servant: Servant, crowd: contextlib.ExitStack) -> socket.socket:
    return crowd.enter_context(socket.create_connection(servant.address, timeout=LIMIT_S))


def answer(challenge: bytes, secret: bytes = SECRET) -> bytes:
    """What a worker says to a server's challenge."""
    own = os.urandom(CHALLENGE_BYTES)
    return own + framing.proof(secret, b"worker", challenge, own)


def is_closed(stranger: socket.socket) -> bool:
    """Whether the server has ended it; its challenge may be read before."""
    stranger.setblocking(False)
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:  # it had sent what nobody read
        pass
    return True


def test_who_knows_the_secret_is_admitted_and_gets_the_servers_proof(servant, crowd):
    worker = knock(servant, crowd)
    servant.until(lambda: servant.strangers == 1)
    challenge = worker.recv(CHALLENGE_BYTES)
    reply = answer(challenge)
    worker.sendall(reply[:10])
    servant.turn(LIMIT_S)
    assert servant.admitted == []
    worker.sendall(reply[10:])
    servant.until(lambda: servant.admitted)
    assert servant.strangers == 0
    assert worker.recv(4096) == framing.proof(SECRET, b"server", challenge, reply[:CHALLENGE_BYTES])
    assert servant.admitted[0].deadline is None


def test_a_recorded_proof_proves_nothing_the_next_time(servant, crowd):
    first, second = knock(servant, crowd), knock(servant, crowd)
    servant.until(lambda: servant.strangers == 2)
    recorded = answer(first.recv(CHALLENGE_BYTES))
    first.sendall(recorded)
    servant.until(lambda: servant.admitted)
    challenge = second.recv(CHALLENGE_BYTES)
    second.sendall(recorded)
    servant.until(lambda: servant.strangers == 0)
    assert len(servant.admitted) == 1
    assert is_closed(second)
    third = knock(servant, crowd)  # nor does what the server itself has said before
    servant.until(lambda: servant.strangers == 1)
    assert third.recv(CHALLENGE_BYTES) != challenge
    third.sendall(challenge + framing.proof(SECRET, b"server", challenge, challenge))
    servant.until(lambda: servant.strangers == 0)
    assert len(servant.admitted) == 1


def test_there_are_never_more_strangers_than_there_is_room_and_the_oldest_goes_first(servant, crowd):
    strangers = []
    for _ in range(30):
        strangers.append(knock(servant, crowd))
        servant.until(lambda: servant.turn() == 0)
        assert servant.strangers == min(len(strangers), 8)
    assert [is_closed(s) for s in strangers] == [True] * 22 + [False] * 8


def test_an_honest_worker_gets_through_a_crowd_that_says_nothing(servant, crowd):
    for _ in range(100):
        knock(servant, crowd)
    worker = knock(servant, crowd)
    for _ in range(5):
        knock(servant, crowd)
    worker.setblocking(False)
    challenge = b""

    def is_challenged() -> bool:
        nonlocal challenge
        with contextlib.suppress(BlockingIOError):
            challenge = worker.recv(CHALLENGE_BYTES)
        return len(challenge) == CHALLENGE_BYTES

    servant.until(is_challenged)
    worker.sendall(answer(challenge))
    servant.until(lambda: servant.admitted)
    assert servant.strangers <= 8


def test_who_does_not_prove_itself_in_time_is_sent_away(servant, crowd, monkeypatch):
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.2)
    silent, slow = knock(servant, crowd), knock(servant, crowd)
    servant.until(lambda: servant.strangers == 2)
    start = time.monotonic()
    slow.sendall(answer(slow.recv(CHALLENGE_BYTES))[:-1])  # a byte short, and no other word
    servant.until(lambda: servant.strangers == 0)
    assert time.monotonic() - start < LIMIT_S / 2
    assert is_closed(silent)
    assert is_closed(slow)
    assert servant.admitted == []


def test_the_limit_for_a_proof_is_ten_seconds(servant, crowd):
    before = time.monotonic()
    knock(servant, crowd)
    servant.until(lambda: servant.strangers == 1)
    (stranger,) = servant.listener._unauthenticated
    assert 0 < stranger.deadline - before < 10.0 + LIMIT_S
    assert listening.HANDSHAKE_S == 10.0


@pytest.mark.parametrize("data", [b"", b"x" * 63, b"x" * 64, b"\xff" * 100_000])
def test_whoever_says_something_else_learns_nothing_but_the_challenge(servant, crowd, data):
    stranger = knock(servant, crowd)
    servant.until(lambda: servant.strangers == 1)
    stranger.sendall(data)
    stranger.shutdown(socket.SHUT_WR)
    servant.until(lambda: servant.strangers == 0)
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := stranger.recv(4096):
            received += more
    assert len(received) <= CHALLENGE_BYTES
    assert servant.admitted == []


class Full:
    """A listener of a process that has no descriptors left, for a while."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.refusals, self.is_full = listener, 0, False

    def accept(self):
        if self.is_full:
            self.refusals += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listener.accept()

    def __getattr__(self, name: str):
        return getattr(self.listener, name)


def test_without_descriptors_the_door_neither_fails_nor_turns_in_circles(listener, crowd):
    full = Full(listener)
    servant = Servant(full)
    full.is_full = True
    knock(servant, crowd)
    assert servant.selector.select(LIMIT_S)
    servant.listener.accept()
    assert full.refusals == 1
    assert servant.selector.select(0) == []  # who waits outside no longer wakes the loop
    servant.listener.maintain()
    assert len(servant.selector.select(LIMIT_S)) == 1  # until the next time
    servant.listener.accept()
    assert full.refusals == 2
    full.is_full = False
    servant.listener.maintain()
    servant.until(lambda: servant.strangers == 1)
    servant.listener.close()
    servant.selector.close()


def test_without_descriptors_strangers_make_room_for_others(listener, crowd):
    full = Full(listener)
    servant = Servant(full)
    first = knock(servant, crowd)
    servant.until(lambda: servant.strangers == 1)
    knock(servant, crowd)
    full.is_full = True
    assert servant.selector.select(LIMIT_S)
    servant.listener.accept()  # the first gives up its descriptor, which in this test helps nobody
    assert servant.strangers == 0
    assert is_closed(first)
    full.is_full = False
    servant.until(lambda: servant.strangers == 1)
    servant.listener.close()
    servant.selector.close()


def test_a_stranger_that_is_gone_before_it_is_greeted_is_no_error(servant, crowd):
    for _ in range(20):
        with socket.create_connection(servant.address, timeout=LIMIT_S) as scan:
            scan.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # ends with a reset
    worker = knock(servant, crowd)
    servant.until(lambda: servant.strangers == 1)
    worker.sendall(answer(worker.recv(CHALLENGE_BYTES)))
    servant.until(lambda: servant.admitted)
