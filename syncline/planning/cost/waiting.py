"""How long workers wait for each other: the largest of n noisy times, and what bounds and local steps make of it.

Here: pure functions of the distribution of a worker's time of a step. Not here: simulating runs (`simulation/`).
"""

from __future__ import annotations

import math
from statistics import NormalDist

from syncline.strategies.traffic import Waits

_NORMAL = NormalDist()


def expected_largest(n: int) -> float:
    """The expected largest of n standard normal values (Blom's approximation); about sqrt(2 ln n)."""
    return 0.0 if n < 2 else _NORMAL.inv_cdf((n - 0.375) / (n + 0.25))


def waiting_factor(waits: Waits, workers: int, *, every: float = 1.0, bound: int = 0) -> float:
    """How many standard deviations of a step's time a worker waits, on average over steps.

    Over `every` steps between two exchanges, noise adds up like its square root. A bound lets workers run ahead, which
    has the same effect as exchanging less often.
    """
    if waits == "nobody" or workers < 2:
        return 0.0
    if waits == "bound":
        return expected_largest(workers) / math.sqrt(every * (1 + bound))
    # One that waits for its neighbors only is held up by theirs in turn: over many steps, half as much in measurements.
    reach = 1.0 if waits == "all" else 0.5
    return reach * expected_largest(workers) / math.sqrt(every)
