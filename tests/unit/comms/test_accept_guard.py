"""However many strangers connect to ZeroMQ's port, most descriptors of the process stay free."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from flood import flood

from syncline.comms import accept_guard, zmq_sockets
from syncline.comms.accept_guard import most_in_use
from syncline.comms.control import Abort, ControlClient, ControlServer, Hello

LIMIT_S = 30.0
STRANGERS = 100
HANDSHAKE_MS = 500


@pytest.fixture
def server(monkeypatch) -> Iterator[ControlServer]:
    monkeypatch.setattr(accept_guard, "_MOST_STRANGERS", STRANGERS)
    monkeypatch.setattr(zmq_sockets, "_HANDSHAKE_MS", HANDSHAKE_MS)
    server = ControlServer("127.0.0.1")
    yield server
    server.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def join(server: ControlServer, worker_id: int) -> ControlClient:
    client = ControlClient(server.launch_spec(worker_id))
    client.send(Hello(worker_id, 1))
    assert server.socket.poll(int(LIMIT_S * 1000)), "no message came"
    assert server.receive() == Hello(worker_id, 1)
    return client


@pytest.mark.slow
def test_strangers_use_few_descriptors_while_workers_talk_and_a_new_worker_gets_in_afterwards(server):
    first = join(server, 0)
    before = descriptors()
    with flood([int(server.address.rpartition(":")[2])], 3000) as strangers:
        peak = before
        while not strangers.is_over:
            peak = max(peak, descriptors())
            threading.Event().wait(0.01)
        outcomes = next(iter(strangers.outcomes().values()))
        server.send(0, Abort("during the flood"))
        assert first.receive(LIMIT_S) == Abort("during the flood")
        assert outcomes["connected"] > STRANGERS
        assert outcomes["unanswered"] > 0, "the port was closed for a while"
        assert STRANGERS / 2 < peak - before < STRANGERS + 1000, "1,000 more is what a slow machine may need to notice"
        second = join(server, 1)  # the strangers are still there, but their time is up
    deadline = time.monotonic() + LIMIT_S
    while descriptors() > before + STRANGERS:
        assert time.monotonic() < deadline, "the strangers' descriptors were not released"
        threading.Event().wait(0.05)
    first.close()
    second.close()


def test_three_quarters_of_the_free_descriptors_are_kept_whatever_the_limit():
    for limit in (64, 1024, 4096, 20000):
        for now in (3, limit // 2, limit - 4, limit):
            assert (limit - now) * 3 // 4 <= limit - most_in_use(now, limit)
            assert most_in_use(now, limit) >= now
