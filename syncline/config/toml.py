"""Reads a run file: all settings of a run in one TOML file. Errors name the file, the line and the key.

Here: from a file to a `Task` and a `RunConfig`. Not here: what the settings mean (`task.py`, `config/run.py`).

    model = "lenet"            # or a table: [model] name = "mlp", hidden = [64, 32]; or layers (declare/)
    data = "mnist"
    workers = 4
    [optimizer]
    name = "sgd"
    lr = 0.05
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from syncline.config.run import RunConfig
from syncline.errors import ConfigError, ConfigFileError, UnknownName

_TASK_KEYS: dict[str, Any] = {
    "model": str | dict,
    "data": str | dict,
    "data_dir": str,
    "loss": str | dict,
    "optimizer": str | dict,
    "schedule": str | dict,
    "metrics": str | list,
    "augment": str | list,
    "weight_decay": float,
    "clip_norm": float,
}


@dataclasses.dataclass(frozen=True)
class RunFile:
    """The contents of a run file."""

    path: Path
    text: str
    task: Mapping[str, Any]
    config: Mapping[str, Any]

    def located(self, error: ConfigError) -> ConfigFileError:
        """The error with the file and, if it is about one of its settings, the line."""
        named = error.facts.get("setting")
        keys = [named] if named in (*self.config, *self.task) else [*self.config, *self.task]
        key = next((k for k in keys if k == named or re.search(rf"\b{re.escape(k)}\b", str(error))), None)
        return ConfigFileError.at(self.path, _line_of(self.text, (key,)) if key else None, error)


def read_run_file(path: Path) -> RunFile:
    """Read and check a run file's keys and types; `ConfigFileError` names file, line, key and what is allowed."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}.", code="no-file", path=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.", code="unreadable-file", path=str(path)) from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise ConfigFileError.at(path, int(line[1]) if line else None, f"Invalid TOML: {error}.") from error
    allowed = {**typing.get_type_hints(RunConfig), **_TASK_KEYS}
    for key, value in data.items():
        line_number = _line_of(text, (key,))
        if key not in allowed:
            raise ConfigFileError.at(path, line_number, UnknownName.among("setting", key, allowed))
        if not _fits(value, allowed[key]):
            problem = ConfigError.for_setting(key, value, _describe_type(allowed[key]))
            raise ConfigFileError.at(path, line_number, problem)
        if key == "model" and isinstance(value, dict) and not isinstance(value.get("layers", 0), int):
            continue  # a declared model, read by `models/declared/read.py`
        if isinstance(value, dict) and not isinstance(value.get("name"), str):
            raise ConfigFileError.at(path, line_number, f'The table [{key}] needs a name: name = "...".')
    if "model" not in data or "data" not in data:
        missing = "model" if "model" not in data else "data"
        raise ConfigFileError.at(path, None, f'{missing} is missing. A run file needs model = "..." and data = "...".')
    task = {k: v for k, v in data.items() if k in _TASK_KEYS}
    return RunFile(path, text, task, {k: v for k, v in data.items() if k not in _TASK_KEYS})


def _line_of(text: str, path: tuple[str, ...]) -> int | None:
    """The line of a top-level key or table. tomllib does not report lines, so the text is searched."""
    key = re.escape(path[0])
    pattern = re.compile(rf"""^\s*(\[\s*)?["']?{key}["']?\s*([=.\]])""")
    in_table = False
    for number, line in enumerate(text.splitlines(), start=1):
        found = pattern.match(line)
        if found and (found[1] or not in_table):
            return number
        if re.match(r"\s*\[", line):
            in_table = True
    return None


def _fits(value: Any, wanted: Any) -> bool:
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(wanted))
    if typing.get_origin(wanted) is Literal:
        return value in typing.get_args(wanted)
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(wanted, type) and isinstance(value, wanted)


def _describe_type(wanted: Any) -> str:
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return " or ".join(_describe_type(o) for o in typing.get_args(wanted) if o is not type(None))
    if typing.get_origin(wanted) is Literal:
        return " or ".join(repr(o) for o in typing.get_args(wanted))
    return {
        int: "an integer",
        float: "a number",
        str: "a string",
        dict: "a table",
        list: "a list",
        bool: "true or false",
    }.get(wanted, str(wanted))
