"""`Range`: a predicted value with the range in which it is expected. Here: its arithmetic, not what it means."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Range:
    """A value between `low` and `high`. Ranges add up as if all were wrong in the same direction, the safe side."""

    low: float
    mid: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.mid <= self.high:
            raise ValueError(f"{self} is no range: low, mid and high must be in this order.")

    @classmethod
    def exactly(cls, value: float) -> Range:
        return cls(value, value, value)

    @classmethod
    def around(cls, value: float, relative: float) -> Range:
        """A value that may be wrong by this part of it in either direction."""
        return cls(value * max(0.0, 1 - relative), value, value * (1 + relative))

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """The median of measurements, between their quartiles."""
        if len(values) < 2:
            return cls.exactly(values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        mid = statistics.median(values)
        return cls(min(low, mid), mid, max(high, mid))

    @classmethod
    def sum(cls, ranges: Iterable[Range]) -> Range:
        total = cls.exactly(0.0)
        for each in ranges:
            total += each
        return total

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.mid + other.mid, self.high + other.high)

    def __mul__(self, factor: float) -> Range:
        """Scaled by a factor that is not negative."""
        return Range(self.low * factor, self.mid * factor, self.high * factor)

    def beyond(self, other: Range) -> Range:
        """By how much this exceeds another value; not less than nothing."""
        low, mid = max(0.0, self.low - other.high), max(0.0, self.mid - other.mid)
        return Range(low, mid, max(mid, self.high - other.low))

    def most(self, other: Range) -> Range:
        """The larger of two values."""
        return Range(max(self.low, other.low), max(self.mid, other.mid), max(self.high, other.high))

    @property
    def spread(self) -> float:
        """The width of the range relative to the value."""
        return (self.high - self.low) / self.mid if self.mid else 0.0

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


ZERO = Range.exactly(0.0)
