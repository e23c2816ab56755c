"""What is sent through a channel arrives, in order, whatever its size; a side that fails does not leave the other."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from syncline.comms.channel import TensorChannel
from syncline.errors import PeerFailed

LIMIT_S = 20.0


def both_sides(
    *, slots: int = 2, slot_bytes: int = 256, is_over: Callable[[], bool] = lambda: False, timeout_s: float = LIMIT_S
) -> tuple[TensorChannel, TensorChannel]:
    memory = memoryview(mmap.mmap(-1, TensorChannel.bytes_needed(slots, slot_bytes)))
    return tuple(
        TensorChannel(
            memory, is_sender=is_sender, slots=slots, slot_bytes=slot_bytes, peer=7,
            is_over=is_over, spin_s=0.0, timeout_s=timeout_s,
        )
        for is_sender in (True, False)
    )  # type: ignore[return-value]  # fmt: skip


@pytest.mark.parametrize("slot_bytes", [64, 256, 65536])
def test_tensors_of_any_size_and_type_arrive_in_order(slot_bytes):
    sender, receiver = both_sides(slot_bytes=slot_bytes)
    torch.manual_seed(0)
    messages = [
        [torch.randn(n, 3), None, torch.arange(n), torch.randn(2, n).bfloat16(), torch.randn(3, n).t()]
        for n in (0, 1, 50, 1000, 7)
    ]
    messages.append([torch.randn(4, requires_grad=True), torch.tensor(True)])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [sender.send(message) for message in messages])
        received = [receiver.receive() for _ in messages]
        sending.result(LIMIT_S)
    for message, got in zip(messages, received, strict=True):
        for a, b in zip(message, got, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.dtype == b.dtype
                assert a.requires_grad == b.requires_grad
                assert torch.equal(a, b)
    assert sender.bytes_sent > sum(t.nbytes for m in messages for t in m if t is not None)


def test_the_sender_does_not_wait_until_all_slots_are_full():
    sender, receiver = both_sides(slots=3)
    for number in range(3):
        sender.send([torch.tensor(number)])
    assert sender.waited_s == 0
    assert [int(receiver.receive()[0]) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_side_that_waits_ends_when_the_run_is_over(side):
    over = threading.Event()
    sender, receiver = both_sides(slots=1, is_over=over.is_set)
    if side == "sender":
        sender.send([torch.zeros(1)])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit((lambda: sender.send([torch.zeros(1)])) if side == "sender" else receiver.receive)
        over.set()
        with pytest.raises(PeerFailed) as caught:
            waiting.result(LIMIT_S)
    assert caught.value.code == "aborted"


def test_a_peer_that_never_answers_is_named():
    _, receiver = both_sides(timeout_s=0.01)
    with pytest.raises(PeerFailed) as caught:
        receiver.receive()
    assert caught.value.code == "timeout"
    assert caught.value.facts["rank"] == 7
