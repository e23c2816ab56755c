"""Every collective keeps the contract: one worker, threads, shared memory and torch.distributed, in real processes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from rank_processes import (
    Died,
    GlooRanks,
    RankProcesses,
    SharedMemoryRanks,
    _open_shared_memory,
    abort,
    children,
    control_segment,
    mapped_segments,
    named_segments,
    start_fork_server,
    stop_fork_server,
)

from syncline.comms.collective import Collective, Solo
from syncline.comms.lock import LOCK_BYTES, SharedLock
from syncline.comms.segment import Segment
from syncline.comms.shared_memory import SharedMemory, SharedMemoryFull
from syncline.errors import ConfigError, PeerFailed
from syncline.testing import collective_contract as contract
from syncline.testing.threads import run_on_threads

pytestmark = pytest.mark.xdist_group("collectives")  # one process, because these tests share a fixture

CPU = torch.device("cpu")
RANKS = [
    ("solo", 1),
    *(("threads", n) for n in (1, 2, 3, 4)),
    *(("shared memory", n) for n in (1, 2, 3, 4, 5)),  # more than the two cores of a small machine
    *(("gloo", n) for n in (2, 3)),
]


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    gc.collect()  # what earlier tests left to be collected is not ours to count
    children_before, segments_before, named_before = children(), mapped_segments(), named_segments()
    start_fork_server()
    yield
    stop_fork_server()
    gc.collect()
    assert children() <= children_before
    assert mapped_segments() <= segments_before
    assert named_segments() <= named_before


@pytest.fixture(scope="module", autouse=True)
def _one_thread_per_rank() -> Iterator[None]:
    """As in the processes, where ranks would otherwise fight for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runner_of(_nothing_is_left_behind: None) -> Iterator[Callable[[str, int], contract.Runner]]:
    """The runner for a transport and a number of ranks; its processes are started once and kept for this module."""
    opened: list[RankProcesses] = []

    @cache
    def processes(size: int) -> RankProcesses:
        opened.append(RankProcesses(size))
        return opened[-1]

    @cache
    def runner(transport: str, size: int) -> Any:
        match transport:
            case "solo":
                return lambda size, work: [work(Solo()) for _ in range(size)]
            case "threads":
                return run_on_threads
            case "shared memory":
                return SharedMemoryRanks(processes(size))
            case "gloo with memory":
                return GlooRanks(processes(size), memory_bytes=10_000_000)
            case _:
                return GlooRanks(processes(size))

    yield runner
    for each in opened:
        each.close()


@contextmanager
def own_processes(size: int) -> Iterator[RankProcesses]:
    """Processes for a test that kills some."""
    processes = RankProcesses(size)
    try:
        yield processes
    finally:
        processes.close()


@pytest.mark.parametrize("check", contract.CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("transport", "size"), RANKS)
def test_contract(runner_of, check, transport, size):
    check(runner_of(transport, size), size)


@pytest.mark.parametrize("check", contract.PROMPT_ABORT, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("transport", "size"), RANKS)
def test_prompt_abort(runner_of, check, transport, size):
    check(runner_of(transport, size), size)


@pytest.mark.parametrize("check", contract.SHARING, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("transport", "size"), [(t, n) for t, n in RANKS if t != "gloo"])
def test_sharing(runner_of, check, transport, size):
    check(runner_of(transport, size), size)


@pytest.mark.parametrize(
    "work",
    [
        contract.a_split_gives_collectives_of_those_with_the_same_color,
        contract.a_split_can_be_split_again,
        contract.a_mix_has_the_bits_of_the_equation,
    ],
    ids=lambda work: work.__name__,
)
def test_what_depends_on_who_talks_to_whom_holds_for_four_ranks_of_gloo(runner_of, work):
    runner_of("gloo", 4)(4, work)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    "work",
    [
        contract.a_split_gives_collectives_of_those_with_the_same_color,
        contract.a_split_can_be_split_again,
        contract.an_abort_of_a_split_is_only_its_own,
        contract.an_abort_reaches_what_was_split,
    ],
    ids=lambda work: work.__name__,
)
def test_what_is_split_from_gloo_may_use_the_memory_of_a_host(runner_of, work, size):
    runner_of("gloo with memory", size)(size, work)


def test_on_one_host_the_parts_of_gloo_share_memory_and_names_are_those_of_the_whole(runner_of):
    def work(collective: Collective) -> tuple[str, float, list[int]]:
        collective._timeout_s = 0.5  # type: ignore[attr-defined]  # for what is split from now on
        part = collective.split(int(collective.rank > 0))
        shared = part.allocate_shared(3, torch.float32)
        shared[part.rank] = 1.0
        part.barrier()
        seen = float(shared.sum())
        facts = {}
        if collective.rank == 1:
            with pytest.raises(PeerFailed) as caught:
                part.barrier()
            facts = caught.value.facts
        collective.barrier()
        return facts, seen, collective.hosts()

    answers = runner_of("gloo with memory", 3)(3, work)
    assert [seen for _, seen, _ in answers] == [1.0, 2.0, 2.0]
    assert answers[1][0] == {"rank": 2, "timeout_s": 0.5}
    assert all(hosts == [0, 0, 0] for _, _, hosts in answers)


@pytest.mark.parametrize("who", [1, 2])
def test_an_abort_of_gloo_by_any_member_ends_a_call_that_waits_in_the_memory_of_a_host(runner_of, who):
    def work(collective: Collective) -> None:
        part = collective.split(int(collective.rank > 0))
        collective.barrier()
        if collective.rank == who:
            threading.Thread(target=collective.abort).start()  # as a worker's link does
        if collective.rank == 1:
            with pytest.raises(PeerFailed):
                part.barrier()

    runner_of("gloo with memory", 3)(3, work)


def test_without_memory_the_parts_of_gloo_talk_all_the_same(runner_of, monkeypatch):
    def work(collective: Collective) -> float:
        def refuse(*_: object) -> Segment:
            raise OSError("no memory left")

        with monkeypatch.context() as patch:
            if collective.rank == 0:
                patch.setattr(Segment, "create", refuse)
            part = collective.split(0)
        value = torch.ones(2)
        part.all_reduce_(value)
        with pytest.raises(ConfigError) as caught:
            part.allocate_shared(1, torch.float32)
        assert caught.value.code == "no-shared-memory"
        return float(value[0])

    assert runner_of("gloo with memory", 2)(2, work) == [2.0, 2.0]


def test_gloo_says_why_it_has_no_memory_to_share(runner_of):
    def work(collective: Collective) -> None:
        with pytest.raises(ConfigError, match=r"torch\.distributed.* shared-memory collective") as caught:
            collective.allocate_shared(1, torch.float32)
        assert caught.value.code == "no-shared-memory"

    runner_of("gloo", 2)(2, work)


class Dies:
    """Work that goes on for ever, in which the process of `victim` is killed as it arrives at a certain barrier."""

    def __init__(self, victim: int, at_barrier: int) -> None:
        self.victim, self.at_barrier = victim, at_barrier

    def __call__(self, collective: Collective) -> float:
        assert isinstance(collective, SharedMemory)
        barrier, arrivals = collective._barrier, 0
        wait = barrier.wait

        def count_and_wait() -> None:
            nonlocal arrivals
            arrivals += 1
            if collective.rank == self.victim and arrivals == self.at_barrier:
                os.kill(os.getpid(), signal.SIGKILL)
            wait()

        barrier.wait = count_and_wait  # type: ignore[method-assign]
        flat = torch.empty(0)
        try:
            flat = collective.allocate(430_000, torch.float32, CPU)
            while True:
                collective.all_reduce_(flat, 0.5)
                collective.all_gather(b"metrics")
        except PeerFailed:
            flat.fill_(1.0)  # the memory outlives whoever made it
            with pytest.raises(PeerFailed):
                collective.barrier()
            return time.monotonic()


# Of the victim's barriers, two belong to `allocate`, then two to each sum and three to each gather.
@pytest.mark.parametrize("at_barrier", [1, 2, 13, 14, 16])
@pytest.mark.parametrize("victim", [0, 2])
def test_when_a_process_is_killed_an_abort_frees_the_others_within_a_second(victim, at_barrier):
    with own_processes(3) as processes, control_segment(3) as control:
        aborted_at: list[float] = []

        def on_failure() -> None:
            aborted_at.append(time.monotonic())
            abort(control, 3)

        opener = partial(_open_shared_memory, control.address, 3, None)
        answers = processes.answers(opener, Dies(victim, at_barrier), on_failure)
        assert isinstance(answers.pop(victim), Died)
        assert all(isinstance(raised_at, float) for raised_at in answers), answers
        assert max(answers) - aborted_at[0] < 1.0
        processes.processes[victim].join()
        assert processes.processes[victim].exitcode == -signal.SIGKILL


class DiesInSplit:
    """Work in which the process of `victim` is killed as it arrives at a certain barrier of a split."""

    def __init__(self, victim: int, at_barrier: int) -> None:
        self.victim, self.at_barrier = victim, at_barrier

    def __call__(self, collective: Collective) -> float:
        assert isinstance(collective, SharedMemory)
        arrivals = 0
        wait = collective._barrier.wait

        def count_and_wait() -> None:
            nonlocal arrivals
            arrivals += 1
            if collective.rank == self.victim and arrivals == self.at_barrier:
                os.kill(os.getpid(), signal.SIGKILL)
            wait()

        collective._barrier.wait = count_and_wait  # type: ignore[method-assign]
        held_before = len(os.listdir("/proc/self/fd"))
        part: Collective | None = None
        try:
            part = collective.split(0 if collective.rank == 3 else 1)
            if collective.rank == self.victim:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                part.all_reduce_(torch.ones(3))
                if part.size == 1:
                    collective.barrier()
        except PeerFailed:
            raised_at = time.monotonic()
        part = None
        collective.close()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == held_before
        return raised_at


# Three barriers belong to each of the two gathers of a split and one follows; later, the victim is just gone.
@pytest.mark.parametrize("at_barrier", [1, 3, 5, 7, 8])
@pytest.mark.parametrize("victim", [0, 2])
def test_when_a_process_is_killed_in_a_split_an_abort_of_the_whole_frees_the_others(victim, at_barrier):
    with own_processes(4) as processes, control_segment(4) as control:
        aborted_at: list[float] = []

        def on_failure() -> None:
            aborted_at.append(time.monotonic())
            abort(control, 4)

        opener = partial(_open_shared_memory, control.address, 4, None)
        answers = processes.answers(opener, DiesInSplit(victim, at_barrier), on_failure)
        assert isinstance(answers.pop(victim), Died)
        assert all(isinstance(raised_at, float) for raised_at in answers), answers
        assert max(answers) - aborted_at[0] < 1.0


def test_gloo_does_not_wait_longer_than_its_limit_for_one_to_mix_with(runner_of):
    def work(collective: Collective) -> None:
        collective._timeout_s = 3.0  # type: ignore[attr-defined]  # for what is split: enough to connect on a busy machine
        part = collective.split(0)
        if collective.rank == 0:
            with pytest.raises(PeerFailed):
                part.mix_(torch.ones(5), {0: {0: 0.5, 1: 0.5}, 1: {1: 1.0}})
        collective.barrier()

    runner_of("gloo", 2)(2, work)


@pytest.mark.parametrize("call", ["all_reduce_", "mix_"])
def test_when_a_process_is_killed_gloo_tells_the_others(call):
    everybody = {rank: {0: 0.5, 1: 0.25, 2: 0.25} for rank in range(3)}

    def work(collective: Collective) -> str:
        collective.barrier()
        if collective.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                if call == "all_reduce_":
                    collective.all_reduce_(torch.ones(1000))
                else:
                    collective.mix_(torch.ones(1000), everybody)
        except PeerFailed as error:
            return str(error)

    with own_processes(3) as processes, GlooRanks(processes).opener(3) as opener:
        *survivors, died = processes.answers(opener, work)
        assert isinstance(died, Died)
        assert all(text.startswith("The exchange failed: ") for text in survivors), survivors


@pytest.mark.parametrize("size", [2, 4])
def test_without_room_every_rank_is_told_and_the_collective_goes_on(runner_of, size):
    limit_bytes = 100_000

    def work(collective: Collective) -> list[str]:
        reasons = []
        for _ in range(20):
            with pytest.raises(SharedMemoryFull) as caught:
                collective.allocate(1_000_000, torch.float32, CPU)
            reasons.append(str(caught.value))
            small = collective.allocate(10, torch.float32, CPU)  # at once, while slow ranks still read the refusal
            small.fill_(1.0)
            collective.all_reduce_(small)
            assert small.tolist() == [float(collective.size)] * 10
        return reasons

    ranks = SharedMemoryRanks(runner_of("shared memory", size).processes, limit_bytes=limit_bytes)
    first, *others = ranks(size, work)
    assert first[0] == f"{size * 4.0:.1f} MB needed, 0.1 MB allowed"
    assert all(reasons == first for reasons in others)


def test_a_limit_counts_what_was_allocated_before(runner_of):
    def work(collective: Collective) -> None:
        held = collective.allocate(10_000, torch.float32, CPU)
        with pytest.raises(SharedMemoryFull, match=r"0\.2 MB needed, 0\.1 MB allowed"):
            collective.allocate(10_000, torch.float32, CPU)
        held.fill_(collective.rank)
        collective.all_reduce_(held)
        assert held.tolist() == [1.0] * 10_000

    SharedMemoryRanks(runner_of("shared memory", 2).processes, limit_bytes=100_000)(2, work)


def test_a_limit_holds_for_what_is_shared_and_in_what_is_split(runner_of):
    def work(collective: Collective) -> None:
        part = collective.split(0)
        for each in (collective, part):
            held = each.allocate_shared(20_000, torch.float32)
            for take in (each.allocate_shared, partial(each.allocate, device=CPU)):
                with pytest.raises(SharedMemoryFull, match=r"0\.[12] MB needed, 0\.1 MB allowed"):
                    take(20_000, dtype=torch.float32)
            held[each.rank] = 1.0
            each.barrier()
            assert held.sum() == 2.0

    SharedMemoryRanks(runner_of("shared memory", 2).processes, limit_bytes=100_000)(2, work)


def test_a_lock_in_shared_memory_protects_it_and_outlives_its_holder():
    def work(collective: Collective) -> tuple[bool, float]:
        memory = collective.allocate_shared(LOCK_BYTES + 8, torch.uint8)
        if collective.rank == 0:
            SharedLock.initialize(memory)
        collective.barrier()
        lock, counter = SharedLock(memory), memory[LOCK_BYTES:].view(torch.float64)
        for _ in range(500):
            with lock.held(30.0):
                counter.add_(1.0)
        collective.barrier()
        if collective.rank == 2:
            lock.acquire(30.0)
        collective.barrier()
        if collective.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with lock.held(30.0) as holder_died:
            return holder_died, counter.item()

    with own_processes(3) as processes, control_segment(3) as control:
        *survivors, died = processes.answers(partial(_open_shared_memory, control.address, 3, None), work)
        assert isinstance(died, Died)
        assert sorted(survivors) == [(False, 1500.0), (True, 1500.0)]


def test_closing_a_collective_frees_what_was_split_from_it(runner_of):
    def work(collective: Collective) -> None:
        gc.collect()  # what earlier tests left in this process
        before = mapped_segments()
        part = collective.split(0).split(0)
        part.allocate(1000, torch.float32, CPU)
        part.allocate_shared(1000, torch.float32)
        assert mapped_segments() == before + 4
        del part
        collective.close()
        assert mapped_segments() == before, "without waiting for the garbage collector"

    runner_of("shared memory", 2)(2, work)


def test_in_a_split_who_does_not_come_is_named_by_its_rank_in_the_run(runner_of):
    def work(collective: Collective) -> None:
        part = collective.split(int(collective.rank > 0))
        collective._timeout_s = 0.01  # type: ignore[attr-defined]  # for what is split from now on
        part._timeout_s = 0.01  # type: ignore[attr-defined]
        again = part.split(0)
        if collective.rank == 1:
            with pytest.raises(PeerFailed, match=r"Rank 2 .* 0\.01 s"):
                again.barrier()
        collective.barrier()

    runner_of("shared memory", 3)(3, work)


def test_threads_with_different_mixings_are_told():
    def work(collective: Collective) -> None:
        collective.mix_(torch.ones(3), {rank: {rank: 0.5 + collective.rank} for rank in range(2)})

    with pytest.raises(AssertionError, match="different calls"):
        run_on_threads(2, work)


def test_shared_memory_is_not_for_other_devices():
    with control_segment(1) as control:
        alone = SharedMemory(control, rank=0, size=1)
        with pytest.raises(ValueError, match="meta"):
            alone.allocate(1, torch.float32, torch.device("meta"))


def test_a_tensor_outlives_the_collective_that_gave_it(runner_of):
    def work(collective: Collective) -> None:
        flat = collective.allocate(1000, torch.float32, CPU)
        gc.collect()  # what earlier tests left in this process
        before = mapped_segments()
        collective.close()
        flat.fill_(2.0)
        assert flat.sum() == 2000.0
        del flat
        gc.collect()
        assert mapped_segments() == before - 1

    runner_of("shared memory", 2)(2, work)


def test_an_allocated_tensor_seen_as_another_type_is_not_summed_as_the_first(runner_of):
    def work(collective: Collective) -> None:
        flat = collective.allocate(6, torch.float32, CPU)
        integers = flat.view(torch.int32)
        integers.fill_(2**24 + 1)
        collective.all_reduce_(integers)
        assert integers.tolist() == [2 * (2**24 + 1)] * 6

    runner_of("shared memory", 2)(2, work)


def test_who_does_not_come_is_named_after_the_time_limit():
    with control_segment(2) as control:
        waits = SharedMemory(control, rank=0, size=2, timeout_s=0.01)
        with pytest.raises(PeerFailed, match=r"Rank 1 .* 0\.01 s"):
            waits.barrier()


def test_a_check_notices_a_broken_promise():
    class AddsWithoutWeight(Solo):
        def all_reduce_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
            pass

    with pytest.raises(AssertionError, match=r"breaks the contract.*the sum of 1 numbers"):
        contract.a_weighted_sum_is_exact(AddsWithoutWeight())
