"""From what users pass as data to what an app takes: a table, ratings or texts.

Here: which reader is for which app. Not here: the readers (`tables.py`, `ratings.py`, `corpus.py`), and checks of what
an app needs (`App.prepare`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from syncline.blocks.app import App
from syncline.blocks.ratings import read_ratings
from syncline.blocks.tables import read_table
from syncline.errors import ConfigError


def read_data(data: Any, app: App, target: str | None) -> tuple[Any, str]:
    """The data for an app, and what to call it."""
    if not isinstance(data, str | os.PathLike):
        if target is not None:
            raise ConfigError(
                f"target is {target!r}, but names a column of a file. Pass data=(X, y).", code="target-of-arrays"
            )
        return data, "arrays"
    path = Path(data)
    if app.data == "table":
        return read_table(path, target), path.name.partition(".")[0]
    if target is not None:
        raise ConfigError(f"target is {target!r}, but {app.name} has none. Leave it out.", code="no-targets-here")
    return read_ratings(path), path.name.partition(".")[0]


def names_in(content: Any) -> tuple[str, ...]:
    """The names of columns, items or words, if the data has them."""
    return tuple(getattr(content, "columns", ()))
