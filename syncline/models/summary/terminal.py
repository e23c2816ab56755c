"""A network as text: one line per layer, with skip connections drawn at the left."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.models.summary.skip_connections import SkipConnection, skip_connections
from syncline.models.summary.summarize import LayerSummary, ModelSummary
from syncline.models.summary.units import format_bytes, format_count, format_shape

_HEADINGS = ("layer", "", "output", "parameters", "memory", "FLOPs")
_TO_THE_RIGHT = (3, 4, 5)
_LONGEST_DETAIL = 44


def as_text(summary: ModelSummary) -> str:
    """A table, and below it the totals for one sample."""
    parts = summary.parts
    gutters = _gutters(parts)
    rows: list[tuple[str, ...]] = [("", *_HEADINGS)]
    rows += [(gutter, *_cells(part, parts, k)) for k, (gutter, part) in enumerate(zip(gutters, parts, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [summary.title, ""]
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column - 1 in _TO_THE_RIGHT else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines += ["", _totals(summary)]
    return "\n".join(lines)


def _cells(part: LayerSummary, parts: Sequence[LayerSummary], number: int) -> tuple[str, ...]:
    detail = part.detail if len(part.detail) <= _LONGEST_DETAIL else part.detail[: _LONGEST_DETAIL - 1] + "…"
    if part.sources and part.sources != (number - 1,):
        taken = "from " + ", ".join(_called(parts[s], s, number) for s in part.sources)
        detail = f"{taken}  {detail}".rstrip()
    flops = format_count(part.flops) if part.flops else ""
    parameters = f"{part.parameters:,}" if part.parameters else ""
    return part.label, detail, format_shape(part.shape), parameters, format_bytes(part.activation_bytes), flops


def _called(part: LayerSummary, number: int, user: int) -> str:
    return "previous" if number == user - 1 and part.name.isdigit() else part.name


def _totals(summary: ModelSummary) -> str:
    weights = format_bytes(summary.parameters * 4)
    return (
        f"{len(summary.parts) - 1} layers, {summary.parameters:,} parameters ({weights} in float32). For one sample: "
        f"{format_count(summary.flops)} FLOPs forward, {format_bytes(summary.activation_bytes)} of activations."
    )


def _gutters(parts: Sequence[LayerSummary]) -> list[str]:
    """The characters at the left of each layer's line."""
    found = skip_connections([part.sources for part in parts])
    width = 1 + 2 * (1 + max((b.lane for b in found), default=-1))
    grid = [[" "] * width for _ in parts]
    for row in grid:
        row[0] = "●"
    for skip in sorted(found, key=lambda b: b.lane):
        _draw(grid, skip)
    return ["".join(row) for row in grid]


def _draw(grid: list[list[str]], skip: SkipConnection) -> None:
    column = 2 * (skip.lane + 1)
    for row in range(skip.start + 1, skip.end):
        grid[row][column] = "┼" if grid[row][column] == "─" else "│"
    for row, corner in ((skip.start, "╮"), (skip.end, "╯")):
        for between in range(1, column):
            grid[row][between] = {"│": "┼", "╮": "┬", "╯": "┴"}.get(grid[row][between], grid[row][between])
            if grid[row][between] == " ":
                grid[row][between] = "─"
        grid[row][column] = corner
