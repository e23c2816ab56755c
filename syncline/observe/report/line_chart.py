"""Lines over an axis, as HTML with one SVG inside: `draw`.

Here: the range of the axes, the drawing, the labels at the ends of the lines. The SVG is stretched to any width, its
strokes are not; all text is HTML beside it, so it stays readable on a phone. `script.py` shows the values under the
pointer, which it reads from the drawing. Not here: what is drawn (`curves.py`), colors (`report_style.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from syncline.observe.page.document import text
from syncline.observe.page.ticks import clock, label, round_numbers, round_times, step_between
from syncline.observe.report.downsample import thin

_SIDE = 1000
"""The drawing is this wide and this high, in its own unit."""
_MOST_POINTS = 400
_Y_TICKS, _X_TICKS = 5, 6
_LOGARITHMIC_FROM = 50.0
_TINY = 1e-300
_NEAR = 0.025
"""Marks closer than this part of the width share a label."""
_LABEL_PERCENT = 10.0
"""How high a label is, of the drawing."""


@dataclass(frozen=True)
class Line:
    """One line: `color` is a place in the palette, `kind` a class of the style: line, faint, dots."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """Lines over one x-axis ("time" in seconds). `write` formats a value.

    `marks` are vertical lines: (x, number, text).
    """

    x_title: str
    lines: Sequence[Line]
    write: Callable[[float], str] = label
    is_fraction: bool = False
    """Whether the values are fractions, shown as percentages."""
    starts_at_zero: bool = False
    may_be_logarithmic: bool = False
    """Whether values of very different magnitude get a logarithmic scale."""
    marks: Sequence[tuple[float, int, str]] = ()


class Scale(NamedTuple):
    """The range of an axis, and its ticks."""

    low: float
    high: float
    ticks: list[float]
    is_logarithmic: bool = False

    def part(self, value: float) -> float:
        """The position of a value, from 0 to 1."""
        if self.is_logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def logarithmic_scale_for(values: Sequence[float]) -> Scale | None:
    """An axis of powers of ten, for values of very different magnitude; None if a linear one suffices."""
    low, high = min(values), max(values)
    if low <= 0 or high / low < _LOGARITHMIC_FROM:
        return None
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [10.0**power for power in range(first, last + 1, 1 + (last - first) // _Y_TICKS)]
    return Scale(10.0**first, 10.0**last, ticks, is_logarithmic=True)


def scale_for(values: Sequence[float], *, is_fraction: bool = False, starts_at_zero: bool = False) -> Scale:
    """An axis with round ends that covers all values; from zero if that costs little room."""
    low, high = min(values), max(values)
    if starts_at_zero or 0 <= low < 0.4 * high:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _TINY):
        margin = max(abs(high) * 0.1, _TINY) if high else 1.0
        low, high = (0.0 if starts_at_zero else low - margin), high + margin
    step = step_between(low, high, _Y_TICKS)
    low, high = step * (low / step // 1), step * -(-high / step // 1)
    if is_fraction:
        high = min(high, 1.0) if max(values) <= 1 else high
    return Scale(low, high, round_numbers(low, high, _Y_TICKS + 2))


def draw(chart: Chart, name: str) -> str:
    """The chart called `name`; lines without points are left out."""
    lines = [line for line in chart.lines if line.points]
    if not lines:
        return '<p class="nothing">No data yet.</p>'
    values = [value for line in lines for _, value in line.points]
    y = logarithmic_scale_for(values) if chart.may_be_logarithmic else None
    y = y or scale_for(values, is_fraction=chart.is_fraction, starts_at_zero=chart.starts_at_zero)
    x = _x_scale([x for line in lines for x, _ in line.points], is_time=chart.x_title == "time")
    inside = [
        *(f'<path class="grid" d="M0 {_down(y, t)}H{_SIDE}"/>' for t in y.ticks),
        *(f'<path class="mark" d="M{_across(x, at)} 0V{_SIDE}"/>' for at, _, _ in chart.marks),
        *(_path(line, x, y) for line in lines),
    ]
    ranges = f'data-x="{x.low:.9g} {x.high:.9g}" data-y="{y.low:.9g} {y.high:.9g}"'
    reading = ' data-percent="1"' if chart.is_fraction else ' data-log="1"' if y.is_logarithmic else ""
    note = '<span class="scale-note">logarithmic</span>' if y.is_logarithmic else ""
    svg = (
        f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(_description(chart, lines, name))}">{"".join(inside)}</svg>'
    )
    return (
        f'<div class="plot" {ranges}{reading} data-unit="{text(chart.x_title)}"><div class="y" aria-hidden="true">'
        f"{''.join(_y_label(chart, y, t) for t in y.ticks)}</div>"
        f'<div class="area">{svg}{note}{_mark_numbers(chart, x)}</div>'
        f'<div class="ends" aria-hidden="true">{_end_labels(chart, lines, y)}</div>'
        f'<div class="x" aria-hidden="true">{"".join(_x_label(chart, x, t) for t in x.ticks)}</div>'
        f'<div class="x-title" aria-hidden="true">{text(chart.x_title)}</div></div>'
    )


def spread_out(places: Sequence[float], least: float) -> list[float]:
    """The places, moved to be at least `least` apart, in the same order, within 0 to 100 if they fit."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    floor = 0.0
    for i in order:
        moved[i] = floor = max(moved[i], floor)
        floor += least
    ceiling = 100.0
    for i in reversed(order):
        moved[i] = ceiling = min(moved[i], ceiling)
        ceiling -= least
    return moved


def _x_scale(values: Sequence[float], *, is_time: bool) -> Scale:
    low, high = min(0.0, *values), max(values)  # every axis starts at the beginning of the run
    if not low < high:
        high = low + 1.0
    return Scale(low, high, (round_times if is_time else round_numbers)(low, high, _X_TICKS))


def _path(line: Line, x: Scale, y: Scale) -> str:
    points = [(_across(x, a), _down(y, b)) for a, b in thin(line.points, _MOST_POINTS)]
    d = "M" + "L".join(f"{a} {b}" for a, b in points)
    if len(points) == 1:
        d += "h0"
    paths = f'<path class="line {line.kind} c{line.color}" d="{d}" data-label="{text(line.label)}"/>'
    if line.kind == "dots" or len(points) == 1:
        dots = "".join(f"M{a} {b}h0" for a, b in points)
        paths += f'<path class="points c{line.color}" d="{dots}"/>'
    return paths


def _across(x: Scale, value: float) -> str:
    return f"{_SIDE * x.part(value):.1f}".removesuffix(".0")


def _down(y: Scale, value: float) -> str:
    return f"{_SIDE * (1 - y.part(value)):.1f}".removesuffix(".0")


def _y_label(chart: Chart, y: Scale, value: float) -> str:
    words = f"{label(round(100 * value, 6))}%" if chart.is_fraction else label(value)
    return f'<span style="top:{100 * (1 - y.part(value)):.2f}%">{words}</span>'


def _x_label(chart: Chart, x: Scale, value: float) -> str:
    words = clock(value) if chart.x_title == "time" else label(value)
    return f'<span style="left:{100 * x.part(value):.2f}%">{words}</span>'


def _mark_numbers(chart: Chart, x: Scale) -> str:
    groups: list[list[tuple[float, int, str]]] = []
    for at, number, words in chart.marks:
        place = x.part(at)
        if 0 <= place <= 1:
            if groups and place - groups[-1][-1][0] < _NEAR:
                groups[-1].append((place, number, words))
            else:
                groups.append([(place, number, words)])
    labels = []
    for group in groups:
        (place, first, _), last = group[0], group[-1][1]
        words = text("; ".join(w for _, _, w in group))
        shown = f"{first}" if first == last else f"{first}–{last}"
        labels.append(f'<span class="mark-number" style="left:{100 * place:.2f}%" title="{words}">{shown}</span>')
    return "".join(labels)


def _end_labels(chart: Chart, lines: Sequence[Line], y: Scale) -> str:
    """Each line's name and last value at its end; faint lines have none."""
    lines = [line for line in lines if line.kind != "faint"]
    places = spread_out([100 * (1 - y.part(line.points[-1][1])) for line in lines], _LABEL_PERCENT)
    is_one = len(lines) == 1  # the chart's title names it
    return "".join(
        f'<span class="c{line.color}" style="top:{place:.2f}%" title="{text(line.label)}"><i></i>'
        f"<b>{text(chart.write(line.points[-1][1]))}</b>{'' if is_one else ' ' + text(line.label)}</span>"
        for line, place in zip(lines, places, strict=True)
    )


def _description(chart: Chart, lines: Sequence[Line], name: str) -> str:
    ranges = "; ".join(
        f"{line.label} from {chart.write(line.points[0][1])} to {chart.write(line.points[-1][1])}" for line in lines
    )
    return f"{name} over {chart.x_title}: {ranges}"
