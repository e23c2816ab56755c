"""A worker's line to the coordinator, against a real control server."""

from __future__ import annotations

import threading
import time

from syncline.comms.control import ControlServer, Hello, NewView, RunFiles, Stop, ViewOf, Welcome
from syncline.workers.link import Link

LIMIT_S = 20.0


def test_what_all_workers_are_told_while_one_joins_is_neither_lost_nor_taken_for_the_answer():
    server = ControlServer("127.0.0.1")
    welcome = Welcome(
        {}, RunFiles(task_path="", run_dir="", checkpoint_path=None), None, 1, [], "", "secret", "session"
    )
    try:
        answer = threading.Thread(target=_answer, args=(server, [NewView(ViewOf(6, [0, 1], None)), Stop(), welcome]))
        answer.start()
        link = Link(server.launch_spec(2, life=3), pid=4242)
        try:
            answer.join(LIMIT_S)
            assert link.welcome == welcome
            assert link.stop_requested
            view = link.next_view(0, LIMIT_S)
            assert view is not None
            assert view.number == 6
        finally:
            link.close()
    finally:
        server.close()


def _answer(server: ControlServer, messages: list[NewView | Stop | Welcome]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not isinstance(server.receive(), Hello):
        assert time.monotonic() < deadline, "the worker says hello"
        server.socket.poll(100)
    for message in messages:
        server.send(2, message)
