"""What a handful of noisy measurements says. Pure functions of numbers.

Here: median and spread, and ratios that are formed inside a round before anything is averaged. A machine that is slow
for a minute slows both sides of a round, so a ratio keeps still where the times themselves do not. Not here: taking
measurements (`harness.py`) and wording (`report.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Spread", "paired_ratios", "quantile", "spread"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Where some numbers lie: the middle one, the middle half of them, and all of them."""

    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    least: float
    most: float
    count: int


def quantile(values: Iterable[float], fraction: float) -> float:
    """The number below which `fraction` of the values lie, linear between neighbours (Hyndman & Fan's type 7)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("No values have no quantile.")
    place = fraction * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    between = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    return min(max(between, ordered[below]), ordered[above])  # rounding must not lead outside


def spread(values: Sequence[float]) -> Spread | None:
    """Median, quartiles and extremes; None if there are no values."""
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
    """Each round's value over the same round's baseline; rounds in which one of them is missing are left out."""
    return [
        value / base
        for value, base in zip(values, baseline, strict=True)
        if value is not None and base is not None and base > 0
    ]
