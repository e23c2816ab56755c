"""Modules that the files in `methods/` use but must not load: they load when first used.

A method's file holds its declaration, which the planner reads before any process starts, and its exchange, which needs
torch. Importing torch takes seconds, so those files take it, and modules that import it, from here.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

__all__ = ["brackets", "codecs", "flat", "lock", "mixing", "outgoing", "overlap", "reducers", "serialize", "torch"]

if TYPE_CHECKING:
    import torch

    from syncline.comms import codecs, lock, mixing, serialize
    from syncline.comms.parameter_server import outgoing
    from syncline.strategies import brackets, flat, overlap, reducers
else:

    class _Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    torch, outgoing = _Lazy("torch"), _Lazy("syncline.comms.parameter_server.outgoing")
    codecs, lock, mixing, serialize = (
        _Lazy(f"syncline.comms.{name}") for name in ("codecs", "lock", "mixing", "serialize")
    )
    brackets, flat, overlap, reducers = (
        _Lazy(f"syncline.strategies.{name}") for name in ("brackets", "flat", "overlap", "reducers")
    )
