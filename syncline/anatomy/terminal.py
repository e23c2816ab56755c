"""A network as text: one line a layer, with the connections that pass by others drawn at the left."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.anatomy.examine import Anatomy, Part
from syncline.anatomy.lanes import Bypass, bypasses
from syncline.anatomy.words import bytes_in_words, count_in_words, shape_in_words

__all__ = ["as_text"]

_HEADINGS = ("layer", "", "output", "parameters", "memory", "FLOPs")
_TO_THE_RIGHT = (3, 4, 5)
_LONGEST_DETAIL = 44


def as_text(anatomy: Anatomy) -> str:
    """A table, and below it the totals for one sample."""
    parts = anatomy.parts
    gutters = _gutters(parts)
    rows: list[tuple[str, ...]] = [("", *_HEADINGS)]
    rows += [(gutter, *_cells(part, parts, k)) for k, (gutter, part) in enumerate(zip(gutters, parts, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [anatomy.title, ""]
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column - 1 in _TO_THE_RIGHT else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines += ["", _totals(anatomy)]
    return "\n".join(lines)


def _cells(part: Part, parts: Sequence[Part], number: int) -> tuple[str, ...]:
    label = part.kind or "input"
    if part.kind and not part.name.isdigit():
        label = f"{part.name}: {part.kind}"
    detail = part.detail if len(part.detail) <= _LONGEST_DETAIL else part.detail[: _LONGEST_DETAIL - 1] + "…"
    if part.sources and part.sources != (number - 1,):
        taken = "from " + ", ".join(_called(parts[s], s, number) for s in part.sources)
        detail = f"{taken}  {detail}".rstrip()
    flops = count_in_words(part.flops) if part.flops else ""
    parameters = f"{part.parameters:,}" if part.parameters else ""
    return label, detail, shape_in_words(part.shape), parameters, bytes_in_words(part.activation_bytes), flops


def _called(part: Part, number: int, user: int) -> str:
    return "previous" if number == user - 1 and part.name.isdigit() else part.name


def _totals(anatomy: Anatomy) -> str:
    weights = bytes_in_words(anatomy.parameters * 4)
    return (
        f"{len(anatomy.parts) - 1} layers, {anatomy.parameters:,} parameters ({weights} in float32). For one sample: "
        f"{count_in_words(anatomy.flops)} FLOPs forward, {bytes_in_words(anatomy.activation_bytes)} of activations."
    )


def _gutters(parts: Sequence[Part]) -> list[str]:
    """For every part the signs at the left of its line."""
    found = bypasses([part.sources for part in parts])
    width = 1 + 2 * (1 + max((b.lane for b in found), default=-1))
    grid = [[" "] * width for _ in parts]
    for row in grid:
        row[0] = "●"
    for bypass in sorted(found, key=lambda b: b.lane):
        _draw(grid, bypass)
    return ["".join(row) for row in grid]


def _draw(grid: list[list[str]], bypass: Bypass) -> None:
    column = 2 * (bypass.lane + 1)
    for row in range(bypass.start + 1, bypass.end):
        grid[row][column] = "┼" if grid[row][column] == "─" else "│"
    for row, corner in ((bypass.start, "╮"), (bypass.end, "╯")):
        for between in range(1, column):
            grid[row][between] = {"│": "┼", "╮": "┬", "╯": "┴"}.get(grid[row][between], grid[row][between])
            if grid[row][between] == " ":
                grid[row][between] = "─"
        grid[row][column] = corner
