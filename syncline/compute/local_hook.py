"""Hooks on a user's model that stay in this process.

`torch.save(model)` pickles a module with its hooks, and `copy.deepcopy` copies them. A hook of ours must neither make
that fail nor act on the copy, and the file may be loaded where there is no Syncline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class LocalHook:
    """A forward pre-hook that copies of its model have not."""

    def __init__(self, call: Callable[[nn.Module], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        del arguments
        self._call(module)

    def __reduce__(self) -> Any:
        # A hook may return the arguments that the module gets. Called with (module, arguments), the method `get` of an
        # empty dict returns the arguments as they are.
        return getattr, ({}, "get")
