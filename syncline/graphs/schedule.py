"""Which vertices are updated next. Here: pure functions of what is pending. Not here: updating (`execution.py`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def due(
    schedule: str, pending: np.ndarray, until: float, *, size: int, total: Callable[[np.ndarray], float]
) -> np.ndarray:
    """The places in `pending` of the vertices of the next round. Empty: there is nothing left to do.

    `pending` is how much the neighbors of each own vertex have changed since its last update; `size` is that of the
    graph, and `total` the sum over all workers.
    """
    if schedule in ("sweep", "chromatic"):
        return np.arange(len(pending))
    if schedule == "fifo":  # all that are queued; each may leave undone its share of what is left in the end
        return np.flatnonzero(pending > until / max(size, 1))
    everything = total(pending)
    if everything <= until:
        return np.empty(0, np.int64)
    if np.isinf(everything):
        return np.flatnonzero(np.isinf(pending))
    # At least the mean. Those below it have little of the sum, and more will have arrived there at their turn: on the
    # graph of Debian's packages this reads half of the edges that updating everything pending does. Other thresholds
    # (a tenth or a hundredth of the largest, the mean by edge) read as many, some of them in many more rounds.
    return np.flatnonzero(pending >= everything / size)
