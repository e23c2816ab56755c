"""Curves of braille dots, two by four per character, or of ASCII characters.

Here: pure functions from numbers to lines of text. Not here: colors, and which metrics to draw (`highlights.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from syncline.observe.formatting import number

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_LEAST_PLOT = 4


def curve(
    values: Sequence[float],
    width: int,
    height: int,
    *,
    label: Callable[[float], str] = number,
    ascii_only: bool = False,
) -> list[str]:
    """`height` lines of `width` characters: the values from left to right, the largest and the smallest as labels.

    Non-finite values are left out, and so are the labels if there is no room for them.
    """
    finite = [float(v) for v in values if math.isfinite(v)]
    width, height = max(width, 0), max(height, 0)
    gutter = _gutter(finite, width, height, label)
    columns = width - gutter
    draw = _ascii if ascii_only else _braille
    rows = draw(_normalized(finite), columns, height) if finite and columns and height else [" " * columns] * height
    if not gutter:
        return rows
    tick, line = ("+", "|") if ascii_only else ("┤", "│")
    texts = {0: label(max(finite)), height - 1: label(min(finite))}
    return [
        f"{texts.get(i, ''):>{gutter - 2}} {tick if i in texts else line}{row}" for i, row in enumerate(rows)
    ]  # fmt: skip


def chart(
    values: Sequence[float],
    width: int,
    height: int,
    *,
    first: str,
    last: str,
    label: Callable[[float], str] = number,
    ascii_only: bool = False,
) -> list[str]:
    """A curve of `height` lines above an x-axis labeled `first` and `last` (two more lines)."""
    lines = curve(values, width, height, label=label, ascii_only=ascii_only)
    width = max(width, 0)
    gutter = _gutter([float(v) for v in values if math.isfinite(v)], width, height, label)
    corner, dash = ("+", "-") if ascii_only else ("└", "─")
    axis = (" " * (gutter - 1) + corner if gutter else "") + dash * (width - gutter)
    room = width - gutter - len(first)
    ends = first + (f"{last:>{room}}" if room > len(last) else "")
    return [*lines, axis, f"{' ' * gutter}{ends}"[:width].ljust(width)]


def _gutter(finite: list[float], width: int, height: int, label: Callable[[float], str]) -> int:
    """How many columns the labels and the axis take; 0 if they are not drawn."""
    if not finite or height < 2:
        return 0  # one line has no vertical scale
    needed = max(len(label(max(finite))), len(label(min(finite)))) + 2
    return needed if width - needed >= _LEAST_PLOT else 0


def _normalized(finite: list[float]) -> list[float]:
    """Scaled to 0..1; equal values to the middle. Halved first: the range of two floats may overflow."""
    low, high = min(finite) / 2, max(finite) / 2
    span = high - low
    return [(v / 2 - low) / span for v in finite] if span > 0 else [0.5] * len(finite)


def _resampled(levels: list[float], columns: int) -> list[float]:
    """One level per column: means where there are more values than columns, straight lines where there are fewer."""
    n = len(levels)
    if n == 1:
        return levels  # a single value is a dot, not a line
    if n > columns:
        edges = [i * n // columns for i in range(columns + 1)]
        return [sum(levels[a:b]) / (b - a) for a, b in pairwise(edges)]
    result = []
    for column in range(columns):
        position = column * (n - 1) / max(columns - 1, 1)
        left = min(int(position), n - 2)
        part = position - left
        result.append(levels[left] * (1 - part) + levels[left + 1] * part)
    return result


def _runs(levels: list[float], rows: int) -> list[tuple[int, int]]:
    """For each column the rows (from the top) that the line passes, without gaps between neighboring columns."""
    runs: list[tuple[int, int]] = []
    last: int | None = None
    for level in levels:
        row = round((1 - min(max(level, 0.0), 1.0)) * (rows - 1))
        if last is None or abs(row - last) <= 1:
            runs.append((row, row))
        else:
            runs.append((min(row, last + 1), max(row, last - 1)))
        last = row
    return runs


def _braille(levels: list[float], columns: int, height: int) -> list[str]:
    cells = [[_BRAILLE] * columns for _ in range(height)]
    for x, (top, bottom) in enumerate(_runs(_resampled(levels, columns * 2), height * 4)):
        for y in range(top, bottom + 1):
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    return ["".join(" " if c == _BRAILLE else chr(c) for c in row) for row in cells]


def _ascii(levels: list[float], columns: int, height: int) -> list[str]:
    cells = [[" "] * columns for _ in range(height)]
    for x, (top, bottom) in enumerate(_runs(_resampled(levels, columns), height)):
        for y in range(top, bottom + 1):
            cells[y][x] = "*"
    return ["".join(row) for row in cells]
