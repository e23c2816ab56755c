"""Staleness: how far workers may drift apart, and how old an update is when it is applied.

Here: the gate of stale-synchronous parallel training (SSP; Ho et al. 2013), the age of updates, and their histogram.
Pure functions of counters. Not here: the counters themselves and waiting (`comms`, `strategies`).

Two clocks are in play:

    clock      of a worker: how many steps it has finished. Bounded by the gate.
    version    of the shared parameters: how many updates have been applied to them. Its difference between reading and
               applying is the *staleness* of an update, which follows from the gate (`staleness_limit`).

SSP with bound s: a worker that has finished c steps may begin another only if every worker has finished c - s. So it
sees at least all updates of the first c - s steps of everyone; it is at most s steps ahead of the slowest when it
begins, and s + 1 when it has finished. With s = 0 that is bulk-synchronous. Only members have clocks: failed workers
are left out, and a replacement starts at the clock of the slowest, or all would wait for it to catch up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Histogram = Mapping[int, int]
"""How many updates had each staleness; those that none had are absent."""


def may_proceed(my_clock: int, clocks: Iterable[int], bound: int) -> bool:
    """Whether a worker that has finished `my_clock` steps may begin another, given all members' clocks."""
    _check_bound(bound)
    return all(my_clock - clock <= bound for clock in clocks)


def holding_up(my_clock: int, clocks: Mapping[int, int], bound: int) -> list[int]:
    """The ranks that a worker must wait for, slowest first; empty if it may proceed."""
    _check_bound(bound)
    return sorted((rank for rank in clocks if my_clock - clocks[rank] > bound), key=lambda rank: (clocks[rank], rank))


def is_fresh(cache_clock: int, my_clock: int, bound: int) -> bool:
    """Whether a worker may use a cached copy, read when the slowest clock was `cache_clock`, for its next step.

    Petuum's worker cache: the copy holds every update of the first `cache_clock` steps, which is all that SSP asks for.
    """
    _check_bound(bound)
    return my_clock - cache_clock <= bound


def staleness(version_at_apply: int, version_at_read: int) -> int:
    """How many updates were applied between reading the parameters and applying what was computed from them."""
    assert version_at_apply >= version_at_read, f"read at version {version_at_read}, applied at {version_at_apply}"
    return version_at_apply - version_at_read


def staleness_limit(workers: int, bound: int) -> int:
    """The largest staleness that the gate allows if each finished step is one update: (K - 1) (2 s + 1) + s.

    A worker in its step c works on a copy that holds at least c - s updates of each worker. Until it finishes, each of
    the K - 1 others can finish no more than c + s + 1: hence 2 s + 1 updates of each. Of its own it may miss s, from
    the steps since it filled its cache; if it reads anew before every step it misses none.
    """
    _check_bound(bound)
    return (workers - 1) * (2 * bound + 1) + bound


def record(histogram: Histogram, value: int, count: int = 1) -> dict[int, int]:
    """The histogram with `count` more updates of staleness `value`."""
    return merge(histogram, {value: count})


def merge(first: Histogram, second: Histogram) -> dict[int, int]:
    """The histogram of both together, in ascending order of staleness."""
    return {value: first.get(value, 0) + second.get(value, 0) for value in sorted({*first, *second})}


def mean_staleness(histogram: Histogram) -> float:
    """The mean over all updates; 0 if there are none."""
    updates = sum(histogram.values())
    return sum(value * count for value, count in histogram.items()) / updates if updates else 0.0


def quantile(histogram: Histogram, fraction: float) -> int:
    """The least staleness that at least `fraction` of the updates do not exceed; 0 if there are none."""
    wanted = fraction * sum(histogram.values())
    reached = 0
    for value in sorted(histogram):
        reached += histogram[value]
        if reached >= wanted:
            return value
    return 0


def _check_bound(bound: int) -> None:
    if bound < 0:
        raise ValueError(f"The staleness bound is {bound}, but it must be 0 or more.")
