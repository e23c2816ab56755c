"""What failures cost: steps that are repeated, repairs, restarts and checkpoints, on top of a run without failures.

A lock-step run stands still while a worker is replaced, and repeats the step in flight; with restarts, everything since
the last checkpoint is lost. Workers at their own pace lose only the failed one's time.
Here: `run_outages`, and the best interval between checkpoints (Young 1974). Not here: how long steps take (`pace.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from syncline.planning.simulation.pace import Pace, Rules
from syncline.planning.simulation.scenario import Scenario

_MOST_FAILURES = 100_000
"""A run that fails more often makes no progress."""


@dataclass(frozen=True, kw_only=True)
class Outages:
    """A run with failures."""

    seconds: float
    failures: int
    repeated_s: float
    """Work that had to be done again."""
    repairs_s: float
    checkpoints_s: float
    interval_s: float | None
    """From one checkpoint to the next; None if there are none."""


def best_interval_s(checkpoint_s: float, mean_time_between_failures_s: float) -> float:
    """Young's first-order optimum sqrt(2 C M), with C the time of a checkpoint and M between failures of the run."""
    return math.sqrt(2 * checkpoint_s * mean_time_between_failures_s)


def run_outages(scenario: Scenario, rules: Rules, pace: Pace) -> Outages:
    """Walk through the run from failure to failure."""
    failures, n = scenario.failures, scenario.workers
    generator = np.random.default_rng([scenario.seed, 1])
    stops_all = rules.waits in ("all", "peers", "bound") or not failures.in_place
    run_mean_s = failures.mean_s / n
    if failures.in_place:
        step_s = pace.seconds / len(pace.step_s)
        count = int(generator.poisson(pace.seconds / run_mean_s)) if math.isfinite(run_mean_s) else 0
        repeated = float(generator.random(count).sum()) * step_s
        part = 1.0 if stops_all else 1 / n
        repaired = count * failures.repair_s * part
        return Outages(
            seconds=pace.seconds + repeated * part + repaired, failures=count, repeated_s=repeated * part,
            repairs_s=repaired, checkpoints_s=0.0, interval_s=None,
        )  # fmt: skip
    interval = failures.interval_s
    if interval is None:
        interval = best_interval_s(failures.checkpoint_s, run_mean_s) if math.isfinite(run_mean_s) else pace.seconds
    return _restarting(pace.seconds, interval, run_mean_s, scenario, generator)


def _restarting(
    work_s: float, interval_s: float, run_mean_s: float, scenario: Scenario, generator: np.random.Generator
) -> Outages:
    """Segments of work, each followed by a checkpoint; one with a failure is repeated after a restart."""
    failures = scenario.failures
    now = done = repeated = repairs = checkpoints = 0.0
    count = 0
    next_failure = generator.exponential(run_mean_s) if math.isfinite(run_mean_s) else math.inf
    while done < work_s and count < _MOST_FAILURES:
        segment = min(interval_s, work_s - done)
        saving = failures.checkpoint_s if segment < work_s - done else 0.0  # nothing is left to lose after the last
        whole = segment + saving
        if now + whole <= next_failure:
            now, done, checkpoints = now + whole, done + segment, checkpoints + saving
            continue
        repeated += next_failure - now
        now, count = next_failure, count + 1
        next_failure = now + generator.exponential(run_mean_s)
        while next_failure < now + failures.repair_s and count < _MOST_FAILURES:  # it fails while it restarts
            repairs += next_failure - now
            now, count = next_failure, count + 1
            next_failure = now + generator.exponential(run_mean_s)
        now, repairs = now + failures.repair_s, repairs + failures.repair_s
    seconds = now if done >= work_s else math.inf
    return Outages(
        seconds=seconds, failures=count, repeated_s=repeated, repairs_s=repairs, checkpoints_s=checkpoints,
        interval_s=interval_s,
    )  # fmt: skip
