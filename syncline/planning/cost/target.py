"""How many samples an accuracy takes, from the curve of a short probe; and how long that takes with a strategy. Pure.

The probe trains as one process would, so what it needs is what the exact strategies need; the others need more by their
factor (`samples.py`). Within the probe the crossing is interpolated, beyond it the error is taken to fall as a power of
the samples. Both are uncertain, and become a range.

Here: `samples_to_target`, `Target`, and reading '98.5%'. Not here: running the probe (`syncline/measuring.py`).
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import ConfigError
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.step import Prediction

_SEEDS = 0.2
"""Another seed may need so many more or fewer samples."""
_FEWEST_TO_FIT = 3
_FURTHEST = 30.0
"""A target that is so many times further away than the probe came is not predicted."""
_UNSURE_SLOPE = 0.3
"""How wrong a slope may be that was fitted to a few points."""


@dataclass(frozen=True)
class Point:
    """An accuracy on the test data, after so many samples."""

    samples: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """An accuracy, and what one process needs for it."""

    accuracy: float
    samples: Range | None
    """None if the probe does not show it."""
    source: str
    """From how much of the curve, as a sentence."""

    def seconds(self, prediction: Prediction) -> Range | None:
        """How long a run takes until then, its start included; None if that is not known."""
        if self.samples is None or prediction.samples is None:
            return None
        need, rate = self.samples, prediction.samples_per_s
        low, mid, high = (
            need.low * prediction.samples.low / rate.high,
            need.mid * prediction.samples.mid / rate.mid,
            need.high * prediction.samples.high / rate.low,
        )
        start = prediction.start_up_s
        return Range(low + start, mid + start, high + start)


def read_target(text: str) -> float:
    """The accuracy that `text` describes: 98.5%, or 0.985."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    value = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    if not 0 < value < 1:
        raise ConfigError.for_setting("target", text, "an accuracy between 0 and 100%, such as 98.5%")
    return value


def samples_to_target(points: Sequence[Point], accuracy: float) -> Range | None:
    """How many samples it takes; None if the points do not lead there."""
    ahead = next((number for number, point in enumerate(points) if point.accuracy >= accuracy), None)
    if ahead is not None:
        return _between(points, ahead, accuracy)
    errors = [(point.samples, 1 - point.accuracy) for point in points if point.accuracy < 1]
    latest = errors[len(errors) // 3 :]  # the first steps fall faster than the rest
    if len(latest) < _FEWEST_TO_FIT:
        return None
    slope = _slope(latest)
    last, least = latest[-1][0], min(error for _, error in latest)
    if slope >= 0:
        return None

    def needed(steepness: float) -> float:
        return float(last * ((1 - accuracy) / least) ** (1 / steepness))

    mid = needed(slope)
    if mid > _FURTHEST * last:
        return None
    low, high = needed(slope * (1 + _UNSURE_SLOPE)), needed(slope * (1 - _UNSURE_SLOPE))
    return Range(min(low * (1 - _SEEDS), mid), mid, max(high * (1 + _SEEDS), mid))


def _between(points: Sequence[Point], ahead: int, accuracy: float) -> Range:
    """Between two points the logarithm of the error is taken to fall evenly."""
    after = points[ahead]
    before = points[ahead - 1] if ahead else Point(0.0, 0.0)
    log = [math.log(max(1e-9, 1 - value)) for value in (before.accuracy, accuracy, after.accuracy)]
    part = (log[1] - log[0]) / (log[2] - log[0]) if log[2] < log[0] else 1.0
    mid = before.samples + part * (after.samples - before.samples)
    return Range(mid * (1 - _SEEDS), mid, max(after.samples, mid * (1 + _SEEDS)))


def _slope(errors: Sequence[tuple[float, float]]) -> float:
    """Of the logarithm of the error over that of the samples: the median over all pairs of points."""
    found = [
        (math.log(b_error) - math.log(a_error)) / (math.log(b_samples) - math.log(a_samples))
        for (a_samples, a_error), (b_samples, b_error) in itertools.combinations(errors, 2)
        if b_samples > a_samples
    ]
    return statistics.median(found) if found else 0.0
