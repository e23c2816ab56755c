"""The time of one answer, of two exported files in turn.

Interleaved, because the speed of a shared machine changes from second to second. Not here: the server's benchmark.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from syncline.serving.exporting.proof import Run

_RUNS, _WARM_UP, _MOST_S = 100, 3, 2.0


def medians_ms(runs: Sequence[Run], sample: tuple[np.ndarray, ...]) -> list[float]:
    """The median time of each of `runs` on one sample, in milliseconds."""
    for run in runs:
        for _ in range(_WARM_UP):
            run(sample)
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + _MOST_S
    for _ in range(_RUNS):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run(sample)
            taken.append(1e3 * (time.perf_counter() - start))
        if time.perf_counter() > end:
            break
    return [statistics.median(taken) for taken in times]
