"""Reading a declared model from a run file, so that every error names its line.

Here: from the text of a TOML file and its table [model] to `Declared`. TOML parsers do not report line numbers, so the
lines are found in the text, for both ways to write layers: tables `[[model.layers]]`, and the elements of an array
`layers = [...]`. Not here: the rest of the file (`config/toml.py`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.config.toml import RunFile
from syncline.errors import ConfigError
from syncline.models.declared.declaration import Declared, TomlLocation, is_declaration, of_table

_TABLE = re.compile(r"\s*\[")
_LAYER_TABLE = re.compile(r"""\s*\[\[\s*["']?model["']?\s*\.\s*["']?layers["']?\s*\]\]""")
_MODEL_TABLE = re.compile(r"""\s*\[\s*["']?model["']?\s*\]""")
_ARRAY = re.compile(r"""^[ \t]*(?:model[ \t]*\.[ \t]*)?["']?layers["']?[ \t]*=[ \t]*\[""", re.MULTILINE)
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_-]+)["']?\s*=""")


def read_model(path: Path) -> Declared:
    """The model that a TOML file declares, whatever else is in the file."""
    try:
        text = path.read_text()
        table = tomllib.loads(text).get("model")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(table, dict) or "layers" not in table:
        raise ConfigError(f"{path} declares no model. It needs [[model.layers]], or [model] with layers = [...].")
    return model_of(table, path, text)


def task_settings(file: RunFile) -> dict[str, Any]:
    """What a run file says about the task, with a declared model in place of its table."""
    settings = dict(file.task)
    if is_declaration(settings["model"]):
        settings["model"] = model_of(settings["model"], file.path, file.text)
    return settings


def model_of(table: Mapping[str, Any], path: Path, text: str) -> Declared:
    """The model of the table [model] in `text`, which was read from `path`."""
    line = _table_line(text)
    location = TomlLocation(path, line, _key_lines(text, line) if line else {})
    locations = [TomlLocation(path, number, _key_lines(text, number)) for number in layer_table_lines(text)]
    locations = locations or [TomlLocation(path, number) for number in array_lines(text)]
    return of_table(table, location, dict(enumerate(locations)))


def _table_line(text: str) -> int | None:
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


def _key_lines(text: str, start: int) -> dict[str, int]:
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
