from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from syncline.comms.lock import LOCK_BYTES, SharedLock
from syncline.comms.segment import Segment
from syncline.errors import PeerFailed

LIMIT_S = 30.0
COUNTER_AT = LOCK_BYTES

# What the processes do, without torch so that they start at once: argv is the segment's address and what to do.
PROGRAM = """
import os, signal, struct, sys
from syncline.comms.lock import SharedLock
from syncline.comms.segment import Segment

memory = Segment.attach(sys.argv[1]).memory
lock = SharedLock(memory, 0)
print("ready", flush=True)
if sys.argv[2] == "count":
    sys.stdin.readline()
    for _ in range(int(sys.argv[3])):
        with lock.held(30.0):
            (count,) = struct.unpack_from("<q", memory, 64)
            struct.pack_into("<q", memory, 64, count + 1)
else:
    lock.acquire(30.0)
    print("held", flush=True)
    sys.stdin.readline()
    lock.release()
"""


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(4096, "test")
    yield made
    made.close_descriptor()


@contextmanager
def process(segment: Segment, *what: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, segment.address, *what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with started:
        try:
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


def go(started: subprocess.Popen[str]) -> None:
    started.stdin.write("go\n")
    started.stdin.flush()


@contextmanager
def holder(segment: Segment) -> Iterator[subprocess.Popen[str]]:
    with process(segment, "hold") as started:
        assert started.stdout.readline() == "held\n"
        yield started


def test_no_increment_of_several_processes_is_lost(segment):
    lock = SharedLock.initialize(segment.memory, 0)
    with process(segment, "count", "20000") as one, process(segment, "count", "20000") as two:
        go(one)
        go(two)
        for _ in range(5000):
            with lock.held(LIMIT_S) as holder_died:
                (count,) = struct.unpack_from("<q", segment.memory, COUNTER_AT)
                struct.pack_into("<q", segment.memory, COUNTER_AT, count + 1)
            assert not holder_died
        assert one.wait(LIMIT_S) == two.wait(LIMIT_S) == 0
    assert struct.unpack_from("<q", segment.memory, COUNTER_AT) == (45_000,)


def test_no_increment_of_several_threads_is_lost(segment):
    SharedLock.initialize(segment.memory, 0)

    def count() -> None:
        lock = SharedLock(segment.memory, 0)
        for _ in range(2000):
            with lock.held(LIMIT_S):
                (count,) = struct.unpack_from("<q", segment.memory, COUNTER_AT)
                struct.pack_into("<q", segment.memory, COUNTER_AT, count + 1)

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert struct.unpack_from("<q", segment.memory, COUNTER_AT) == (6000,)


def test_a_killed_holder_does_not_block_others_and_is_reported_once(segment):
    lock = SharedLock.initialize(segment.memory, 0)
    with holder(segment) as held:
        os.kill(held.pid, signal.SIGKILL)
        with lock.held(LIMIT_S) as holder_died:
            assert holder_died
    with lock.held(LIMIT_S) as holder_died:
        assert not holder_died


def test_who_waits_already_takes_over_from_a_killed_holder(segment):
    lock = SharedLock.initialize(segment.memory, 0)
    outcome: list[bool] = []
    with holder(segment) as held:
        thread = threading.Thread(target=lambda: (outcome.append(lock.acquire(LIMIT_S)), lock.release()))
        thread.start()
        held.kill()
        thread.join(LIMIT_S)
    assert outcome == [True]


def test_a_holder_that_lets_go_is_not_reported_as_dead(segment):
    lock = SharedLock.initialize(segment.memory, 0)
    with holder(segment) as held:
        go(held)
        assert held.wait(LIMIT_S) == 0
        with lock.held(LIMIT_S) as holder_died:
            assert not holder_died


@pytest.mark.parametrize("timeout_s", [0.0, 0.05, 0.3])
def test_a_wait_ends_at_its_limit(segment, timeout_s):
    lock = SharedLock.initialize(segment.memory, 0)
    with holder(segment):
        start = time.monotonic()
        with pytest.raises(PeerFailed, match=f"{timeout_s:g} s") as raised, lock.held(timeout_s):
            pass
        assert timeout_s <= time.monotonic() - start < timeout_s + 5.0
        assert raised.value.facts == {"timeout_s": timeout_s}


def test_an_error_within_the_block_lets_go(segment):
    lock = SharedLock.initialize(segment.memory, 0)
    with pytest.raises(KeyError), lock.held(LIMIT_S):
        raise KeyError
    assert not lock.acquire(LIMIT_S)
    lock.release()


def test_taking_it_twice_is_a_mistake_that_is_told_at_once(segment):
    lock = SharedLock.initialize(segment.memory, 0)
    with lock.held(LIMIT_S), pytest.raises(RuntimeError, match="already"):
        lock.acquire(LIMIT_S)


def test_letting_go_of_what_another_holds_is_a_mistake(segment):
    lock = SharedLock.initialize(segment.memory, 0)
    with holder(segment), pytest.raises(AssertionError, match="EPERM"):
        lock.release()


def test_memory_that_was_not_initialized_is_not_taken_for_a_lock(segment):
    with pytest.raises(AssertionError, match=r"must call SharedLock\.initialize"):
        SharedLock(segment.memory, 0).acquire(LIMIT_S)


@pytest.mark.parametrize("kind", ["mmap", "memoryview", "tensor"])
def test_locks_lie_side_by_side_in_any_kind_of_memory(segment, kind):
    memory: mmap.mmap | memoryview | torch.Tensor = {
        "mmap": lambda: segment.memory,
        "memoryview": lambda: memoryview(segment.memory)[128:512],
        "tensor": lambda: torch.frombuffer(segment.memory, dtype=torch.float32)[16:],
    }[kind]()
    first, second = (SharedLock.initialize(memory, offset) for offset in (0, LOCK_BYTES))
    del memory
    with first.held(LIMIT_S), second.held(LIMIT_S), pytest.raises(RuntimeError, match="already"):
        first.acquire(LIMIT_S)


def test_a_lock_keeps_its_memory():
    lock = SharedLock.initialize(torch.zeros(LOCK_BYTES, dtype=torch.uint8))
    with lock.held(LIMIT_S):
        pass


def test_a_lock_that_does_not_fit_is_refused(segment):
    with pytest.raises(ValueError, match="64 bytes, but the memory ends 63 bytes after offset 4033"):
        SharedLock(segment.memory, 4033)
    with pytest.raises(ValueError, match="multiple of 8 bytes"):
        SharedLock(segment.memory, 4)
    with pytest.raises(ValueError, match="contiguous"):
        SharedLock(torch.zeros(256, 2, dtype=torch.uint8).t(), 0)
