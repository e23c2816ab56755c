"""A suite's values as horizontal bars: one inline SVG per contender, and one for the axis below them.

Here: positions on the axis, and drawing. A bar ends at the median, its whisker is the interquartile range, each round
is a dot. Positions are percentages, so that the drawing scales to any width without distortion. Not here: names and
numbers beside the bars, colors (`html.py`, `html_style.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from syncline.lab.statistics import Spread
from syncline.observe.page.ticks import label, round_numbers

_HEIGHT, _THICKNESS, _CAP, _DOT = 38, 18, 9, 2.5
_MIDDLE = _HEIGHT / 2
_JITTER = (0.0, -4.5, 4.5, -2.25, 2.25)
"""Dots of neighboring rounds are drawn at different heights, so that equal values stay visible."""
_MANY_ROUNDS = 20
_MOST_TICKS = 6
_LOGARITHMIC_FROM = 40.0
"""Beyond this ratio of medians, the smaller bars would be invisible on a linear scale."""
_FAR_OUT = 2.0
"""The axis ends at this multiple of the largest quartile, so that one outlier does not shrink all bars."""


class BarAxis(NamedTuple):
    """The range of values that is drawn."""

    low: float
    high: float
    is_logarithmic: bool = False

    def percent(self, value: float) -> float:
        """The position of a value, from 0 to 100; values outside the axis are drawn at its end."""
        low, high = self.low, self.high
        if self.is_logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return 100 * min(max((value - low) / (high - low), 0.0), 1.0)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def axis_for(spreads: Sequence[Spread]) -> BarAxis:
    """An axis that shows all of these: from zero if possible, otherwise logarithmic."""
    ends = [e for s in spreads for e in (s.low, s.median, s.high) if math.isfinite(e)]
    if not ends:
        return BarAxis(0.0, 1.0)
    least, most = min(s.least for s in spreads), max(s.most for s in spreads)
    medians = [s.median for s in spreads]
    if least > 0 and math.isfinite(most) and max(medians) / min(medians) > _LOGARITHMIC_FROM:
        return BarAxis(10.0 ** math.floor(math.log10(least)), 10.0 ** math.ceil(math.log10(most)), is_logarithmic=True)
    low = max(min(least, 0.0), _FAR_OUT * min(*ends, 0.0))
    high = min(max(most, 0.0), _FAR_OUT * max(*ends, 0.0))
    if not low < high:
        return BarAxis(0.0, 1.0)
    return BarAxis(low, high)


def ticks(axis: BarAxis) -> list[float]:
    """Round numbers along the axis, few enough for their labels to fit."""
    if axis.is_logarithmic:
        first, last = round(math.log10(axis.low)), round(math.log10(axis.high))
        return [10.0**power for power in range(first, last + 1, 1 + (last - first) // _MOST_TICKS)]
    return round_numbers(axis.low, axis.high, _MOST_TICKS)


def draw_bar(axis: BarAxis, values: Sequence[float | None], found: Spread | None, kind: str, unit: str) -> str:
    """One contender: bar, whisker and dots. `kind` is its CSS class, for the colors."""
    parts = [_line(axis.percent(t), 0, axis.percent(t), _HEIGHT, "grid") for t in ticks(axis)]
    if found is not None and math.isfinite(found.median):
        parts += _bar(axis, found)
        parts += [_dot(axis, n, v, unit) for n, v in enumerate(values, start=1) if v is not None and math.isfinite(v)]
        parts += _whisker(axis, found)
    kinds = f"bar {escape(kind)}{' many' * (len(values) > _MANY_ROUNDS)}"
    return f'<svg class="{kinds}" width="100%" height="{_HEIGHT}" aria-hidden="true">{"".join(parts)}</svg>'


def draw_axis(axis: BarAxis, unit: str) -> str:
    """The numbers below the bars."""
    parts = []
    for value in ticks(axis):
        place = axis.percent(value)
        anchor = "start" if place < 3 else "end" if place > 93 else "middle"
        parts.append(f'<text x="{place:.2f}%" y="14" text-anchor="{anchor}">{label(value)}</text>')
    return f'<svg class="axis" width="100%" height="20" role="img" aria-label="{escape(unit)}">{"".join(parts)}</svg>'


def _bar(axis: BarAxis, found: Spread) -> list[str]:
    if axis.is_logarithmic:  # its length means nothing there: a thin line to the median
        return [_line(0, _MIDDLE, axis.percent(found.median), _MIDDLE, "stem")]
    start, end = sorted((axis.percent(0.0), axis.percent(found.median)))
    y = _MIDDLE - _THICKNESS / 2
    return [
        f'<rect class="fill" x="{start:.2f}%" y="{y:g}" width="{end - start:.2f}%" height="{_THICKNESS}" rx="2"/>',
        _line(axis.percent(0.0), y, axis.percent(0.0), y + _THICKNESS, "foot"),  # keeps a bar of length 0 visible
    ]


def _whisker(axis: BarAxis, found: Spread) -> list[str]:
    low, median, high = (axis.percent(v) for v in (found.low, found.median, found.high))
    top, bottom = _MIDDLE - _CAP / 2, _MIDDLE + _CAP / 2
    return [
        _line(low, _MIDDLE, high, _MIDDLE, "whisker"),
        _line(low, top, low, bottom, "whisker"),
        _line(high, top, high, bottom, "whisker"),
        _line(median, _MIDDLE - _THICKNESS / 2, median, _MIDDLE + _THICKNESS / 2, "median"),
    ]


def _dot(axis: BarAxis, number: int, value: float, unit: str) -> str:
    y = _MIDDLE + _JITTER[number % len(_JITTER)]
    title = f"<title>round {number}: {value:.4g} {escape(unit)}</title>"
    kind = "dot" if axis.holds(value) else "dot beyond"
    return f'<circle class="{kind}" cx="{axis.percent(value):.2f}%" cy="{y:g}" r="{_DOT}">{title}</circle>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.2f}%" y1="{y1:g}" x2="{x2:.2f}%" y2="{y2:g}"/>'
