"""The gate that keeps workers within reach of each other, and the age of updates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comms.staleness import (
    holding_up,
    is_fresh,
    may_proceed,
    mean_staleness,
    merge,
    quantile,
    record,
    staleness,
    staleness_limit,
)

bounds = st.integers(0, 6)
clocks = st.dictionaries(st.integers(0, 20), st.integers(0, 30), min_size=1, max_size=8)
histograms = st.dictionaries(st.integers(0, 50), st.integers(1, 100), max_size=8)


@given(clocks, bounds)
def test_the_slowest_may_always_proceed(clocks, bound):
    assert may_proceed(min(clocks.values()), clocks.values(), bound)


@given(clocks, bounds)
def test_whoever_may_not_proceed_is_told_for_whom_it_waits(clocks, bound):
    for clock in clocks.values():
        waits_for = holding_up(clock, clocks, bound)
        assert (waits_for == []) == may_proceed(clock, clocks.values(), bound)
        assert all(clock - clocks[rank] > bound for rank in waits_for)
        assert [clocks[rank] for rank in waits_for] == sorted(clocks[rank] for rank in waits_for)


@given(clocks)
def test_a_bound_of_zero_is_bulk_synchronous(clocks):
    for clock in clocks.values():
        assert may_proceed(clock, clocks.values(), 0) == (clock == min(clocks.values()))


@given(clocks, bounds)
def test_whatever_a_bound_allows_a_wider_one_allows_too(clocks, bound):
    for clock in clocks.values():
        assert may_proceed(clock, clocks.values(), bound) <= may_proceed(clock, clocks.values(), bound + 1)


@given(st.integers(1, 6), bounds, st.integers(0, 10_000), st.booleans(), st.integers(1, 60))
def test_no_schedule_exceeds_the_bound_or_the_staleness_that_follows_from_it(workers, bound, seed, uses_cache, eager):
    """Workers in a random order begin, read (or use a cache that is still fresh) and finish; one of them is eager."""
    choose = random.Random(seed)
    finished, version = [0] * workers, 0
    working: dict[int, int] = {}  # worker: the version that it read
    cache: dict[int, tuple[int, int]] = {}  # worker: (slowest clock when it was read, version)
    for _ in range(300):
        worker = choose.choices(range(workers), [eager, *[1] * (workers - 1)])[0]
        if worker in working:
            age = staleness(version, working.pop(worker))
            assert age <= staleness_limit(workers, bound) - (0 if uses_cache else bound)
            finished[worker] += 1
            version += 1
        elif may_proceed(finished[worker], finished, bound):
            assert finished[worker] - min(finished) <= bound
            cached = cache.get(worker)
            if not (uses_cache and cached and is_fresh(cached[0], finished[worker], bound)):
                cached = cache[worker] = (min(finished), version)
            working[worker] = cached[1]
        assert max(finished) - min(finished) <= bound + 1


def test_the_limit_of_staleness_is_reached():
    # Two workers, bound 1. The other is one step behind when this one reads, and two ahead when it has finished.
    assert staleness_limit(2, 1) - 1 == 3
    assert may_proceed(1, [1, 0], 1)
    assert all(may_proceed(clock, [1, clock], 1) for clock in (0, 1, 2))
    assert not may_proceed(3, [1, 3], 1)


def test_alone_nothing_is_stale_and_nobody_is_waited_for():
    assert staleness_limit(1, 0) == 0
    assert may_proceed(1000, [], 0)


def test_an_update_cannot_be_applied_before_it_was_read():
    assert staleness(7, 7) == 0
    with pytest.raises(AssertionError, match="read at version 8, applied at 7"):
        staleness(7, 8)


def test_a_negative_bound_is_refused():
    with pytest.raises(ValueError, match="The staleness bound is -1"):
        may_proceed(0, [0], -1)


@given(st.lists(st.integers(0, 20), max_size=60))
def test_a_histogram_counts_every_update_once(values):
    histogram: dict[int, int] = {}
    for value in values:
        histogram = record(histogram, value)
    assert histogram == {value: values.count(value) for value in sorted(set(values))}
    assert list(histogram) == sorted(histogram)
    assert mean_staleness(histogram) == pytest.approx(sum(values) / len(values) if values else 0.0)
    assert quantile(histogram, 1.0) == max(values, default=0)
    assert quantile(histogram, 0.0) == min(values, default=0)
    assert quantile(histogram, 0.5) == (sorted(values)[(len(values) - 1) // 2] if values else 0)


@given(histograms, histograms, histograms)
def test_histograms_of_workers_may_be_merged_in_any_order(a, b, c):
    assert merge(merge(a, b), c) == merge(c, merge(b, a))
    assert merge(a, {}) == a
    assert sum(merge(a, b).values()) == sum(a.values()) + sum(b.values())
