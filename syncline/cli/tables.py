"""The table of `syncline strategies`."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap

from syncline.strategies.answers import brief_text_of
from syncline.strategies.presets import PRESETS

_NARROWEST, _WIDEST = 80, 120
_GAP = 2


def strategy_table(width: int | None = None) -> str:
    """The named strategies: their four choices, the system they follow and the paper; as wide as the terminal."""
    width = min(max(width or shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    rows = [["name", "what", "when", "whom", "how"]]
    for preset in PRESETS.values():
        levels = preset.make().levels
        if len(levels) > 1:
            rows.append([preset.name])
        for where, level in levels.items():
            rows.append([f"  {where}" if where else preset.name, *map(brief_text_of, level.answers or ())])
    sources = [[preset.name, f"{preset.after}. {preset.paper}."] for preset in PRESETS.values()]
    return "\n".join(["Strategies by name", *_columns(rows, width), "", "Systems and papers", *_list(sources, width)])


def _columns(rows: list[list[str]], width: int) -> list[str]:
    """Aligned columns; without enough room, the cells of the widest columns are wrapped."""
    columns = list(itertools.zip_longest(*rows, fillvalue=""))
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(piece) for cell in column for piece in ["", *_pieces(cell)]) for column in columns]
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        widths[widest] -= 1
    lines = []
    for row in rows:
        cells = [_broken(cell, room) for cell, room in zip(row, widths, strict=False)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            lines.append(
                (" " * _GAP).join(f"{part:<{room}}" for part, room in zip(parts, widths, strict=False)).rstrip()
            )
    return lines


def _broken(text: str, room: int) -> list[str]:
    """Wrapped to at most `room` characters."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _pieces(text: str) -> list[str]:
    """Unbreakable pieces: up to a bracket, a comma or an equals sign."""
    return re.findall(r"[^(,=]*[(,=]\s*|[^(,=]+$", text)


def _list(rows: list[list[str]], width: int) -> list[str]:
    """A name, and beside it a text on one or more lines."""
    room = max(len(name) for name, _ in rows) + _GAP
    lines = []
    for name, text in rows:
        first, *others = textwrap.wrap(text, width - room, break_on_hyphens=False)
        lines += [f"{name:<{room}}{first}", *(" " * room + other for other in others)]
    return lines
