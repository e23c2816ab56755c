from __future__ import annotations

import threading

import pytest

from syncline.comms.barrier import SharedBarrier
from syncline.comms.segment import Segment
from syncline.errors import PeerFailed


def barriers(size: int, timeout_s: float = 10.0) -> list[SharedBarrier]:
    segment = Segment.create(SharedBarrier.bytes_needed(size), "test")
    made = [SharedBarrier(segment.memory, 0, rank=r, size=size, spin_s=0.0, timeout_s=timeout_s) for r in range(size)]
    segment.close_descriptor()
    return made


def test_a_barrier_to_which_everybody_came_is_complete_even_if_somebody_aborts_on_leaving_it():
    for _ in range(300):
        slow, quick = barriers(2)
        raised: list[BaseException] = []

        def arrive(barrier: SharedBarrier = slow, raised: list[BaseException] = raised) -> None:
            try:
                barrier.wait()
            except PeerFailed as error:
                raised.append(error)

        thread = threading.Thread(target=arrive)
        thread.start()
        quick.wait()
        quick.abort()
        thread.join()
        assert not raised


def test_a_wait_after_an_abort_raises_at_once_on_every_rank():
    first, second = barriers(2)
    first.abort()
    for barrier in (first, second):
        with pytest.raises(PeerFailed, match="aborted"):
            barrier.wait()


def test_a_rank_that_does_not_come_is_named_after_the_limit():
    first, _ = barriers(2, timeout_s=0.3)
    with pytest.raises(PeerFailed, match=r"Rank 1 .* 0\.3 s"):
        first.wait()


def test_counters_go_on_beyond_what_they_can_hold():
    segment = Segment.create(SharedBarrier.bytes_needed(2), "test")
    words = memoryview(segment.memory).cast("I")
    words[0] = words[16] = 2**32 - 2
    pair = [SharedBarrier(segment.memory, 0, rank=r, size=2, spin_s=0.0, timeout_s=10) for r in range(2)]
    thread = threading.Thread(target=lambda: [pair[1].wait() for _ in range(5)])
    thread.start()
    for _ in range(5):
        pair[0].wait()
    thread.join()
    assert words[0] == words[16] == 3
    segment.close_descriptor()
