"""Which vertices are updated next. Here: pure functions of what is pending. Not here: updating (`execution.py`)."""

from __future__ import annotations

import numpy as np


def due(schedule: str, pending: np.ndarray, until: float) -> np.ndarray | None:
    """The vertices of the next round; None: all. Empty: there is nothing left to do.

    `pending` is how much the neighbors of each vertex have changed since its last update.
    """
    if schedule in ("sweep", "chromatic"):
        return None
    size = len(pending)
    if schedule == "fifo":  # all that are queued; each may leave undone its share of what is left in the end
        return np.flatnonzero(pending > until / max(size, 1))
    total = float(pending.sum())
    if total <= until:
        return np.empty(0, np.int64)
    if np.isinf(total):
        return np.flatnonzero(np.isinf(pending))
    # At least the mean. Those below it have little of the sum, and more will have arrived there at their turn: on the
    # graph of Debian's packages this reads half of the edges that updating everything pending does. Other thresholds
    # (a tenth or a hundredth of the largest, the mean by edge) read as many, some of them in many more rounds.
    return np.flatnonzero(pending >= total / size)
