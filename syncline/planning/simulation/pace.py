"""When each worker finishes each step, without failures: what stragglers, waiting and queues make of it.

All workers of a step are computed at once; the state is one number for each worker. The rules, with c a step, t(i, c)
when worker i has finished it, and x(i, c) its own time of it:

    all       t(i, c) = max_j (t(j, c-1) + x(j, c)) + exchange, every so many steps; in between t + x
    peers     the same, with the maximum over i and those that it exchanges with in this step
    bound     t(i, c) = max(t(i, c-1), max_j t(j, c-1-s)) + x(i, c), then the queue of the servers
    nobody    t(i, c) = t(i, c-1) + x(i, c), then the queue of the servers

With n workers whose requests keep the servers busy for s each, a worker's exchanges are at least n s apart; while the
servers are not saturated, it waits as in an M/D/1 queue, rho s / (2 (1 - rho)) with their utilization rho.

Here: `run_pace`, pure but for the seeded generator. Not here: failures (`outages.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from syncline.planning.simulation.scenario import Scenario
from syncline.strategies.traffic import Waits

Times = npt.NDArray[np.float64]

_STALENESS_SAMPLES = 50
"""In how many steps, at most, staleness is looked at."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a strategy's workers meet: its exchange that waits for most."""

    waits: Waits
    every: float = 1.0
    bound: int = 0
    exchange_s: float = 0.0
    """Of one exchange, for those who take part."""
    service_s: float = 0.0
    """For how long one worker's exchange keeps the servers busy."""
    each_step_s: float = 0.0
    """Of all other exchanges, such as those inside a host, per step."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A run without failures."""

    seconds: float
    step_s: Times
    """How long the run took for each step, as the mean over the workers; adds up to the seconds."""
    waited: float
    """The part of the workers' time in which they waited."""
    staleness: dict[int, int] = field(default_factory=dict)
    """For `nobody`: how many updates of others came between reading and applying. For `bound`: steps ahead of the
    slowest."""


def run_pace(scenario: Scenario, rules: Rules) -> Pace:
    """Let all workers take all steps."""
    n, generator = scenario.workers, np.random.default_rng(scenario.seed)
    now = np.zeros(n)
    ends, computed = np.zeros(scenario.steps + 1), 0.0
    slowest = np.zeros(scenario.steps + 1)
    """When all workers had finished this many steps."""
    every = max(1, round(rules.every))
    last: Times = rules.service_s * np.arange(
        1.0 - n, 1.0, dtype=np.float64
    )  # busy servers take one after another, from the first step on
    seen: dict[int, int] = {}
    looked = max(1, scenario.steps // _STALENESS_SAMPLES)
    finished = [now]
    for step, own in enumerate(_own_times(scenario, generator)):
        started = now
        if rules.waits == "bound" and step > rules.bound:
            started = np.maximum(now, slowest[step - rules.bound])
        if rules.waits == "bound" and step % looked == 0:
            _count(seen, step - (np.searchsorted(slowest[: step + 1], started, side="right") - 1))
        now = started + own + rules.each_step_s
        computed += float(own.sum())
        if (step + 1) % every == 0:
            last = now = _exchanged(now, last, rules, step // every, scenario.compute_s * every)
        slowest[step + 1] = now.max()
        ends[step + 1] = now.mean()
        if rules.waits == "nobody":
            finished.append(now)
    if rules.waits == "nobody":
        _count_updates(seen, finished, looked)
    seconds = float(now.max()) if rules.waits in ("all", "bound") else float(now.mean())
    ends *= seconds / max(float(ends[-1]), 1e-300)
    waited = 1 - computed / max(seconds * n, 1e-300)
    return Pace(seconds=seconds, step_s=np.diff(ends), waited=max(0.0, waited), staleness=dict(sorted(seen.items())))


def _own_times(scenario: Scenario, generator: np.random.Generator) -> Iterator[Times]:
    """Each step's times of all workers; their mean is the scenario's, times that of the lognormal distribution."""
    for _ in range(scenario.steps):
        if scenario.straggling:
            noise = np.exp(scenario.straggling * generator.standard_normal(scenario.workers, dtype=np.float32))
            yield (scenario.compute_s * noise).astype(np.float64)
        else:
            yield np.full(scenario.workers, scenario.compute_s)


def _exchanged(arrived: Times, last: Times, rules: Rules, round: int, between_s: float) -> Times:
    """When each worker has made its exchange, the last of which was made at `last`."""
    if rules.waits == "all":
        return np.full(len(arrived), arrived.max() + rules.exchange_s)
    if rules.waits == "peers":
        return np.maximum(arrived, arrived[_peers(len(arrived), round)]) + rules.exchange_s
    if not rules.service_s:
        return arrived + rules.exchange_s
    all_s = len(arrived) * rules.service_s
    busy = all_s / (between_s + rules.service_s)
    in_queue = min(rules.service_s * busy / (2 * (1 - busy)), all_s) if busy < 1 else 0.0
    return np.maximum(arrived + rules.service_s + in_queue, last + all_s) + rules.exchange_s


def _peers(n: int, round: int) -> npt.NDArray[np.int64]:
    """Whom each worker exchanges with: as on the exponential graph, one that is 1, 2, 4... places away in turn."""
    places = max(1, math.ceil(math.log2(n)))
    place: int = 2 ** (round % places)
    return np.roll(np.arange(n, dtype=np.int64), place)


def _count_updates(seen: dict[int, int], finished: list[Times], looked: int) -> None:
    """Between two steps of a worker, how many others finished one; only in the middle, where all workers train."""
    ends = np.sort(np.concatenate(finished[1:])) if len(finished) > 1 else np.zeros(0)
    for step in range(len(finished) // 5 + 1, max(len(finished) // 5 + 2, 4 * len(finished) // 5), looked):
        if step < len(finished):
            before, now = finished[step - 1], finished[step]
            between = np.searchsorted(ends, now, side="left") - np.searchsorted(ends, before, side="right")
            _count(seen, between)


def _count(seen: dict[int, int], values: npt.NDArray[np.int64]) -> None:
    found, counts = np.unique(values, return_counts=True)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        seen[value] = seen.get(value, 0) + count
