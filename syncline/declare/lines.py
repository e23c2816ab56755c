"""On which lines of a run file the layers of a model stand. TOML parsers do not tell, so it is looked up in the text.

Both ways to write layers are found: tables `[[model.layers]]`, and the elements of an array `layers = [...]`.
"""

from __future__ import annotations

import re

__all__ = ["array_lines", "key_lines", "layer_table_lines", "table_line"]

_TABLE = re.compile(r"\s*\[")
_LAYER_TABLE = re.compile(r"""\s*\[\[\s*["']?model["']?\s*\.\s*["']?layers["']?\s*\]\]""")
_MODEL_TABLE = re.compile(r"""\s*\[\s*["']?model["']?\s*\]""")
_ARRAY = re.compile(r"""^[ \t]*(?:model[ \t]*\.[ \t]*)?["']?layers["']?[ \t]*=[ \t]*\[""", re.MULTILINE)
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_-]+)["']?\s*=""")


def table_line(text: str) -> int | None:
    """The line of `[model]`, or of the first layer's table."""
    for pattern in (_MODEL_TABLE, _LAYER_TABLE, re.compile(r"\s*model\b")):
        for number, line in enumerate(text.splitlines(), start=1):
            if pattern.match(line):
                return number
    return None


def layer_table_lines(text: str) -> list[int]:
    """The line of every layer that is a table, in order."""
    return [n for n, line in enumerate(text.splitlines(), start=1) if _LAYER_TABLE.match(line)]


def array_lines(text: str) -> list[int]:
    """The line of every layer that is the element of an array, in order."""
    found = _ARRAY.search(text)
    return _element_lines(text, found.end()) if found else []


def key_lines(text: str, start: int) -> dict[str, int]:
    """The lines of the settings in the table that begins on line `start`."""
    keys: dict[str, int] = {}
    for number, line in enumerate(text.splitlines()[start:], start=start + 1):
        if _TABLE.match(line):
            break
        if found := _KEY.match(line):
            keys.setdefault(found[1], number)
    return keys


def _element_lines(text: str, position: int) -> list[int]:
    """Where the elements of an array begin whose opening bracket ends at `position`."""
    lines: list[int] = []
    depth, waiting = 1, True
    while position < len(text) and depth:
        letter = text[position]
        if letter == "#":
            position = text.find("\n", position)
            if position < 0:
                break
            continue
        if depth == 1 and waiting and letter not in " \t\r\n]":
            lines.append(text.count("\n", 0, position) + 1)
            waiting = False
        if letter in "\"'":
            position = _end_of_text(text, position)
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 1:
            waiting = True
        position += 1
    return lines


def _end_of_text(text: str, start: int) -> int:
    """The position of the quote that ends the text beginning at `start`."""
    quote, position = text[start], start + 1
    while position < len(text) and text[position] != quote:
        position += 2 if text[position] == "\\" and quote == '"' else 1
    return position
