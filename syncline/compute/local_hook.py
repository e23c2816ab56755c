"""Hooks on a user's model that stay in this process.

`torch.save(model)` pickles a module with its hooks, and `copy.deepcopy` copies them. A hook of ours must not make that
fail, act on the copy, or leave a trace in the file: it may be loaded where there is no Syncline, and by `torch.load`
with its default `weights_only=True`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class LocalHook:
    """A forward pre-hook that copies of its model have not."""

    def __init__(self, call: Callable[[nn.Module], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        del arguments
        self._call(module)

    def __reduce__(self) -> Any:
        # For a model with hooks of its own. A hook may return the arguments that the module gets. Called with (module,
        # arguments), the method `get` of an empty dict returns the arguments as they are.
        return getattr, ({}, "get")


class LocalResultHook:
    """A forward hook that copies of its model have not, called with the result."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        del module, arguments
        self._call(result)

    def __reduce__(self) -> Any:
        # As above. A forward hook may return None for the result as it is, as this method does with any arguments.
        return getattr, (Exception(), "__init__")


class _Hooks(OrderedDict[int, Any]):
    """The hooks of a module, which are copied and pickled without the local ones."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([item for item in self.items() if not isinstance(item[1], _LOCAL)])


_LOCAL = (LocalHook, LocalResultHook)


def register_local_hook(model: nn.Module, hook: LocalHook, *, with_kwargs: bool = False) -> RemovableHandle:
    """Call `hook` before each forward pass of `model`."""
    if not model._forward_pre_hooks:  # otherwise the handles of its hooks refer to this dict
        model._forward_pre_hooks = _Hooks()
    return model.register_forward_pre_hook(hook, with_kwargs=with_kwargs)


def register_local_result_hook(model: nn.Module, hook: LocalResultHook) -> RemovableHandle:
    """Call `hook` after each forward pass of `model`."""
    if not model._forward_hooks:
        model._forward_hooks = _Hooks()
    return model.register_forward_hook(hook)
