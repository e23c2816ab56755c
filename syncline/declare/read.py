"""Reading a model from a run file, with every mistake at its line.

Here: from the text of a TOML file and its table [model] to `Declared`. Not here: the rest of the file
(`config/toml.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.declare.declared import Declared, Place, of_table
from syncline.declare.lines import array_lines, key_lines, layer_table_lines, table_line
from syncline.errors import ConfigError

__all__ = ["model_of", "read_model"]


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


def model_of(table: Mapping[str, Any], path: Path, text: str) -> Declared:
    """The model of the table [model] in `text`, which was read from `path`."""
    line = table_line(text)
    place = Place(path, line, key_lines(text, line) if line else {})
    places = [Place(path, number, key_lines(text, number)) for number in layer_table_lines(text)]
    places = places or [Place(path, number) for number in array_lines(text)]
    return of_table(table, place, dict(enumerate(places)))
