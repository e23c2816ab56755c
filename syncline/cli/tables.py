"""Tables that commands print."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap

from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.presets import PRESETS
from syncline.strategies.strategy import Strategy, brief_text_of

__all__ = ["strategy_table"]

_NARROWEST, _WIDEST = 80, 120
_GAP = 2
_INSIDE, _ACROSS = "  inside a host", "  across hosts"


def strategy_table(width: int | None = None) -> str:
    """The presets: their four answers, after which system, and the paper; as wide as the terminal, within reason."""
    width = min(max(width or shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    rows = [["name", "what", "when", "whom", "how"]]
    for preset in PRESETS.values():
        made = preset.make()
        if isinstance(made, Hierarchy):
            rows.append([preset.name])
            rows.append([_INSIDE, *_answers(made.inside_host)])
            rows.append([_ACROSS, *_answers(made.across_hosts)])
        else:
            rows.append([preset.name, *_answers(made)])
    told = [[preset.name, f"{preset.after}. {preset.paper}."] for preset in PRESETS.values()]
    return "\n".join(
        ["Strategies by name", *_columns(rows, width), "", "After which system, and the paper", *_list(told, width)]
    )


def _answers(strategy: Strategy) -> list[str]:
    return [brief_text_of(answer) for answer in (strategy.what, strategy.when, strategy.whom, strategy.how)]


def _columns(rows: list[list[str]], width: int) -> list[str]:
    """Rows side by side; where there is no room, the widest columns are broken where one would draw breath."""
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
    """In lines of at most `room` letters."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _pieces(text: str) -> list[str]:
    """What must stay together: up to a bracket, a comma or an equals sign."""
    return re.findall(r"[^(,=]*[(,=]\s*|[^(,=]+$", text)


def _list(rows: list[list[str]], width: int) -> list[str]:
    """A name, and beside it a text that may take several lines."""
    room = max(len(name) for name, _ in rows) + _GAP
    lines = []
    for name, text in rows:
        first, *others = textwrap.wrap(text, width - room, break_on_hyphens=False)
        lines += [f"{name:<{room}}{first}", *(" " * room + other for other in others)]
    return lines
