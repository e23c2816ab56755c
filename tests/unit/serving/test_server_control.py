"""The socket between the supervisor and a server process: messages of any size, whole and in order."""

from __future__ import annotations

import os
import select
import threading

import pytest

from syncline.serving.server.control import CollectMetrics, Lines, Port


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("blocks", [True, False])
def test_messages_larger_than_the_sockets_buffer_arrive_whole_and_in_order(blocks):
    ours, theirs = Port.pair()
    ours.socket.setblocking(blocks)
    sent = [Lines(1, ["x" * 5_000_000, "y"]), CollectMetrics(2), Lines(3, ["z" * 65_000]), Lines(4, ["z" * 66_000])]
    before = open_files()
    assert all(ours.send(message) for message in sent)
    assert [theirs.receive() for _ in sent] == sent
    assert open_files() == before
    ours.close()
    assert theirs.receive() is None
    theirs.close()


def test_a_full_buffer_is_waited_for_until_the_other_end_reads():
    ours, theirs = Port.pair()
    ours.socket.setblocking(False)
    received = []

    def read() -> None:
        while (message := theirs.receive()) is not None:
            received.append(message.number)

    reader, count = threading.Thread(target=read), 20
    for number in range(count):
        if not reader.is_alive() and not select.select([], [ours.socket], [], 0)[1]:
            reader.start()
        assert ours.send(Lines(number, ["x" * 60_000]))
    assert reader.is_alive()  # the buffer was full
    ours.close()
    reader.join(30)
    assert received == list(range(count))
    theirs.close()


def test_the_end_of_the_other_side_is_no_error():
    ours, theirs = Port.pair()
    theirs.close()
    assert ours.send(Lines(1, ["x" * 5_000_000])) is False
    assert ours.send(CollectMetrics(1)) is False
    ours.close()
