"""Modules of a user's model that compute in another way in this process, for a time.

Here: `replace_forward` and `restore_forward`. The modules stay the same objects, with the same parameters, hooks and
keys of `state_dict`. Copies and pickles of them are what they were before: a copied model computes by itself, and a
file can be loaded where there is no Syncline. Not here: what they compute instead (`divided_layers.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

_FORWARD = "_syncline_forward"


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let `module` call `forward(module, own, ...)` instead of `own`, its own."""
    module.__dict__[_FORWARD] = forward
    module.__class__ = _local_class(type(module))  # type: ignore[arg-type]  # mypy finds classes unhashable


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forward`."""
    if isinstance(module, _LocalForward):
        module.__class__ = module.plain_class  # type: ignore[assignment]
        del module.__dict__[_FORWARD]


class _LocalForward(nn.Module):
    """First in the method resolution order of a replaced module's class."""

    plain_class: type[nn.Module]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.__dict__[_FORWARD](self, super().forward, *inputs, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, state, *rest = reduced
        if type(self) in arguments:  # otherwise the class below has its own way
            make, arguments = object.__new__, (self.plain_class,)
        return make, arguments, {name: value for name, value in state.items() if name != _FORWARD}, *rest


@functools.cache
def _local_class(plain: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": plain.__module__, "__doc__": plain.__doc__, "plain_class": plain}
    return type(plain.__name__, (_LocalForward, plain), names)
