"""`History`: a metric over a run of any length, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence


class History:
    """(step, value) points. At capacity, neighbors are averaged and the stride doubles."""

    def __init__(self, capacity: int = 256) -> None:
        assert capacity % 2 == 0, "pairs of points are averaged"
        self._capacity = capacity
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._pending: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        """Append a value; non-finite values are dropped."""
        if not math.isfinite(value):
            return
        self._pending.append((step, value))
        if len(self._pending) < self._stride:
            return
        self._points.append(_mean(self._pending))
        self._pending = []
        if len(self._points) == self._capacity:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, self._capacity, 2)]
            self._stride *= 2

    def forget_after(self, step: int) -> None:
        """Drop later points: a run that resumes at `step` repeats them."""
        self._points = [p for p in self._points if p[0] <= step]
        self._pending = [p for p in self._pending if p[0] <= step]

    def __len__(self) -> int:
        return len(self._points) + bool(self._pending)

    @property
    def points(self) -> list[tuple[int, float]]:
        """Oldest first, no more than the capacity."""
        return [*self._points, _mean(self._pending)] if self._pending else list(self._points)

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]


def _mean(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value / len(points) for _, value in points)
