"""Syncline: train any PyTorch model on many workers, with any synchronization strategy, and never lose work.

The public names are listed in `__init__.pyi`. They are loaded on first use, so that `import syncline` takes no time.
"""

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HOME = {
    name: module
    for module, name in re.findall(
        r"^from (\S+) import (\w+) as \w+$", Path(__file__).with_suffix(".pyi").read_text(), re.MULTILINE
    )
}
"""Each public name with the module that defines it."""

__all__ = sorted(_HOME)  # type checkers read `__init__.pyi`


def __getattr__(name: str) -> Any:
    if name in ("graph", "spark"):  # modules of their own; what they need is loaded when something in them is used
        return importlib.import_module(f"syncline.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'syncline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
