"""Fetching ahead: in order, with errors carried over, and nothing left running."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import children
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from syncline.data.order import Position, SampleOrder, Share
from syncline.data.prefetch import Fetched, Prefetcher, fetch, prefetched, read_inline
from syncline.data.random_state import seeded
from syncline.data.source import ArraySource, DatasetSource

LIMIT_S = 30.0
BEGINNING = Position()


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    threads, processes = set(threading.enumerate()), children()
    yield
    for thread in set(threading.enumerate()) - threads:
        if thread.name == "QueueFeederThread":
            thread.join(LIMIT_S)  # of multiprocessing: told to end, but nobody waits for it
    assert set(threading.enumerate()) <= threads
    assert children() <= processes


class Noisy(Dataset[Any]):
    """Every sample is drawn at random, from all the generators that people use."""

    def __init__(self, count: int = 20, bad: int | None = None) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if index == self.bad:
            raise KeyError(f"no file for {index}")
        return index, random.random(), np.random.random(), torch.rand(()).item()


def shares(
    count: int = 20, batch: int = 5, *, rank: int = 0, size: int = 1, start: Position = BEGINNING
) -> Iterator[Share]:
    return SampleOrder(seed=3, count=count, batch=batch).shares(start, rank=rank, size=size, epochs=2)


def numbers(fetched: list[Fetched]) -> dict[tuple[int, int], tuple[float, ...]]:
    """By epoch and sample, what the Dataset drew for it."""
    found = {}
    for each in fetched:
        for row in zip(*(column.tolist() for column in each.data), strict=True):
            found[each.share.position.epoch, row[0]] = row[1:]
    return found


def test_items_come_in_order_and_then_the_end_again_and_again():
    with Prefetcher(range(100), depth=2) as ahead:
        assert list(ahead) == list(range(100))
        assert list(ahead) == []
        assert list(ahead) == []


def test_a_thread_works_ahead_but_only_so_far():
    produced: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for i in itertools.count():
            produced.append(i)
            if len(produced) == 4:
                third.set()
            yield i

    with Prefetcher(items(), depth=3) as ahead:
        assert third.wait(LIMIT_S)  # three wait in the queue, and one in the hand of the thread
        assert len(produced) == 4
        assert next(ahead) == 0


def test_an_error_comes_where_it_happened_and_stays():
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("three")

    with Prefetcher(items()) as ahead:
        assert [next(ahead), next(ahead)] == [1, 2]
        for _ in range(3):
            with pytest.raises(KeyError, match="three"):
                next(ahead)


def test_an_error_at_the_first_item_comes_at_the_first_request():
    with Prefetcher(1 // x for x in [0]) as ahead, pytest.raises(ZeroDivisionError):
        next(ahead)


def test_closing_in_the_middle_ends_the_thread_and_the_generator_behind_it():
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.set()

    generator = items()  # somebody refers to it, so it is not ended for want of references
    ahead = Prefetcher(generator, depth=2)
    assert next(ahead) == 0
    ahead.close()
    assert ended.is_set()
    assert "syncline-prefetch" not in {t.name for t in threading.enumerate()}


def test_after_closing_there_is_nothing_more_and_no_consumer_blocks():
    ahead = Prefetcher(itertools.count())
    next(ahead)
    ahead.close()
    ahead.close()
    assert list(ahead) == []


def test_closing_frees_who_waits_in_another_thread():
    begun, release = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        begun.set()
        release.wait(LIMIT_S)
        yield from ()

    ahead = Prefetcher(items())
    assert begun.wait(LIMIT_S)
    found: list[list[int]] = []
    waits = threading.Thread(target=lambda: found.append(list(ahead)))
    waits.start()
    release.set()
    ahead.close()
    waits.join(LIMIT_S)
    assert found == [[]]


def test_an_error_need_not_be_consumed_before_closing():
    def items() -> Iterator[int]:
        raise KeyError("never seen")
        yield

    ahead = Prefetcher(items())
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.parametrize("loaders", [0, 1, 2])
def test_every_share_comes_with_its_samples_in_order(loaders):
    wanted = list(shares())
    with Prefetcher(fetch(DatasetSource(Noisy()), iter(wanted), loaders=loaders, seed=0)) as ahead:
        fetched = list(ahead)
    assert [f.share.position for f in fetched] == [s.position for s in wanted]
    assert [f.data[0].tolist() for f in fetched] == [s.indices.tolist() for s in wanted]


def test_arrays_need_no_loader_processes():
    before = children()
    source = ArraySource(torch.arange(20))
    with Prefetcher(fetch(source, shares(), loaders=2, seed=0)) as ahead:
        first = next(ahead)
        assert children() == before
    assert first.data[0].tolist() == first.share.indices.tolist()


@pytest.mark.parametrize("loaders", [0, 1])
def test_an_empty_share_brings_two_samples_to_show_what_batches_look_like(loaders):
    # Five samples for eight workers: the last three have nothing.
    wanted = list(shares(count=5, batch=5, rank=7, size=8))
    with Prefetcher(fetch(DatasetSource(Noisy(5)), iter(wanted), loaders=loaders, seed=0)) as ahead:
        fetched = list(ahead)
    assert [len(f.share.indices) for f in fetched] == [0, 0]
    assert [f.data[0].tolist() for f in fetched] == [[0, 0], [0, 0]]


def test_what_loader_processes_draw_depends_on_seed_epoch_and_sample_only():
    def drawn(seed: int, size: int, start: Position = BEGINNING, batch: int = 5, loaders: int = 1) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for rank in range(size):
            share = shares(batch=batch, rank=rank, size=size, start=start)
            found |= numbers(list(fetch(DatasetSource(Noisy()), share, loaders=loaders, seed=seed)))
        return found

    whole = drawn(seed=0, size=1)
    assert len(whole) == 40
    assert drawn(seed=0, size=2, batch=7) == whole
    assert drawn(seed=0, size=1, loaders=2) == whole
    resumed = drawn(seed=0, size=1, start=Position(1, 10, 6))
    assert resumed == {k: whole[k] for k in resumed}
    assert len(resumed) == 10
    assert all(a != b for k, v in drawn(seed=1, size=1).items() for a, b in zip(v, whole[k], strict=True))
    for index in range(20):
        assert whole[0, index] != whole[1, index], "the second epoch draws what the first drew"


def test_loader_processes_leave_this_process_and_its_random_numbers_alone():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    list(fetch(DatasetSource(Noisy()), shares(), loaders=1, seed=0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_an_error_in_this_process_names_the_samples():
    source = DatasetSource(Noisy(bad=7))
    with Prefetcher(fetch(source, shares(batch=20), loaders=0, seed=0)) as ahead, pytest.raises(KeyError) as caught:
        list(ahead)
    first = ", ".join(str(i) for i in next(shares(batch=20)).indices[:5])
    assert caught.value.__notes__ == [f"This happened while reading samples {first}, ... (20 in all) of epoch 0."]


def test_an_error_for_an_empty_share_names_the_sample_that_stood_in():
    source = DatasetSource(Noisy(5, bad=0))
    share = shares(count=5, batch=5, rank=7, size=8)
    with pytest.raises(KeyError) as caught:
        next(fetch(source, share, loaders=0, seed=0))
    assert caught.value.__notes__ == ["This happened while reading samples 0, 0 of epoch 0."]


def test_an_error_in_a_loader_process_names_the_very_sample_and_leaves_no_process():
    before = children()
    good: list[Fetched] = []
    with Prefetcher(fetch(DatasetSource(Noisy(bad=7)), shares(), loaders=2, seed=0)) as ahead:
        with pytest.raises(KeyError) as caught:
            good.extend(ahead)
        text = str(caught.value)
    assert "This happened while reading sample 7 of epoch 0." in text
    assert "no file for 7" in text
    assert all(7 not in f.share.indices for f in good)
    assert children() == before, "the error is still at hand, but the processes must be gone"


def test_a_loader_process_that_is_killed_is_an_error_and_not_a_hang(monkeypatch):
    # torch looks for dead processes every five seconds.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))

    class Deadly(Noisy):
        def __getitem__(self, index: int) -> Any:
            os._exit(9)

    items = fetch(DatasetSource(Deadly()), shares(), loaders=1, seed=0)
    with Prefetcher(items) as ahead, pytest.raises(RuntimeError, match="exited unexpectedly: exit code 9"):
        next(ahead)


def test_reading_inline_draws_what_processes_draw_and_leaves_the_generators_alone():
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(()).item()

    source = DatasetSource(Noisy())
    by_processes = numbers(list(fetch(source, shares(), loaders=2, seed=5)))
    with seeded(1):
        expected = [drawn() for _ in range(8)]
    with seeded(1), read_inline(source, shares(), seed=5) as fetched:
        read, got = [], []
        for item in fetched:
            read.append(item)
            got.append(drawn())
    assert numbers(read) == by_processes
    assert got == expected


class Sometimes(Noisy):
    """Draws for a few samples only, and counts how often each sample is read."""

    def __init__(self, *, draws: bool = True) -> None:
        super().__init__()
        self.draws, self.reads = draws, [0] * 20

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        self.reads[index] += 1
        return super().__getitem__(index) if self.draws and index % 7 == 3 else (index, 0.0, 0.0, 0.0)


def test_samples_for_which_nothing_is_drawn_need_no_seed_and_others_have_theirs():
    expected = numbers(list(fetch(DatasetSource(Noisy()), shares(), loaders=1, seed=5)))
    for rank, size in [(0, 1), (0, 2), (1, 2)]:
        some = list(read_inline(DatasetSource(Sometimes()), shares(rank=rank, size=size), seed=5))
        for (epoch, index), drawn in numbers(some).items():
            assert drawn == (expected[epoch, index] if index % 7 == 3 else (0.0, 0.0, 0.0)), index


def test_a_batch_is_read_again_only_when_the_first_random_sample_is_found():
    plain, random_too = Sometimes(draws=False), Sometimes()
    for dataset in (plain, random_too):
        list(read_inline(DatasetSource(dataset), shares(), seed=5))
    assert plain.reads == [2] * 20, "once in each epoch"
    assert sorted(random_too.reads) == [2] * 15 + [3] * 5


def test_reading_inline_names_the_sample_that_failed():
    with pytest.raises(KeyError, match="no file for 7") as caught:
        list(read_inline(DatasetSource(Noisy(bad=7)), shares(), seed=5))
    assert "sample 7 of epoch 0" in caught.value.__notes__[0]


@pytest.mark.parametrize("text", ["DataLoader worker (pid 7) is killed by signal: Killed.", "of another kind"])
def test_while_waiting_the_error_of_torchs_signal_handler_is_left_to_the_thread_with_the_loader(text):
    with Prefetcher(iter(["the explained error"])) as ahead:
        get = ahead._queue.get

        def interrupted(**options: Any) -> Any:
            ahead._queue.get = get  # type: ignore[method-assign]  # once, as a signal does
            raise RuntimeError(text)

        ahead._queue.get = interrupted  # type: ignore[method-assign]
        if text.startswith("DataLoader"):
            assert next(ahead) == "the explained error"
        else:
            with pytest.raises(RuntimeError, match=text):
                next(ahead)


def test_closing_in_the_middle_ends_the_loader_processes():
    before = children()
    with Prefetcher(fetch(DatasetSource(Noisy(1000)), shares(1000), loaders=2, seed=0)) as ahead:
        next(ahead)
        assert len(children() - before) == 2
    assert children() == before


class _Endless(Dataset[Any]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        return index


def _stopped_loader(ahead: Any, before: set[int]) -> int:
    next(ahead)
    (loader,) = children() - before
    os.kill(loader, signal.SIGSTOP)
    return loader


def test_a_stopped_loader_process_is_continued_within_three_seconds_and_reported():
    warnings: list[str] = []
    before = children()
    source = DatasetSource(_Endless())
    with prefetched(
        source, shares(10_000, 5), samples=5, loaders=1, seed=1, warn=warnings.append
    ) as ahead:  # fmt: skip
        loader = _stopped_loader(ahead, before)
        deadline = time.monotonic() + 3.0
        while not warnings:
            assert time.monotonic() < deadline
            next(ahead)
        assert str(loader) in warnings[0]
        next(ahead)


def test_a_stopped_loader_process_does_not_hold_up_closing():
    before = children()
    ahead = prefetched(DatasetSource(_Endless()), shares(10_000, 5), samples=5, loaders=1, seed=1)
    _stopped_loader(ahead, before)
    since = time.monotonic()
    ahead.close()
    assert time.monotonic() - since < 4.0
