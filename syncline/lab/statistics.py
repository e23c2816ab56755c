"""Statistics of a few noisy measurements. Pure functions of numbers.

Here: median and spread, and paired ratios: computed within a round, before any averaging. A machine that is slow for a
minute slows both sides of a round, so ratios are stable where times are not. Not here: measuring (`bench/harness.py`)
and text (`bench/report.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, quartiles and extremes of some values."""

    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    least: float
    most: float
    count: int


def quantile(values: Iterable[float], fraction: float) -> float:
    """The quantile of the values, interpolated linearly (Hyndman & Fan's type 7)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("There is no quantile of no values.")
    place = fraction * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    between = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    return min(max(between, ordered[below]), ordered[above])  # rounding must not leave the interval


def spread(values: Sequence[float]) -> Spread | None:
    """None if there are no values."""
    if not values:
        return None
    return Spread(
        median=quantile(values, 0.5),
        low=quantile(values, 0.25),
        high=quantile(values, 0.75),
        least=min(values),
        most=max(values),
        count=len(values),
    )


def paired_ratios(values: Sequence[float | None], baseline: Sequence[float | None]) -> list[float]:
    """Each round's value divided by the same round's baseline; rounds without both are skipped."""
    return [
        value / base
        for value, base in zip(values, baseline, strict=True)
        if value is not None and base is not None and base > 0
    ]
