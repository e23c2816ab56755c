"""Which modules of a model are kept whole when it is cut, unless the model names its units itself.

A module is kept whole if it is a layer of torch, if it has hooks or its forward function was replaced on the instance,
or if it is a block: one of several siblings of one class with layers inside, such as the residual blocks of a ResNet or
the layers of a transformer. A block that itself lists blocks in a container is opened. So is everything else, such as
`nn.Sequential`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from syncline.compute.recompute import is_recomputed

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OPEN = (*_LISTS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


class WholeModules:
    """The modules of one model that are kept whole, and why, if they had to be."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module] = ()) -> None:
        self._model = model
        self._blocks = set(units or _blocks(model))
        self.reasons: dict[str, str] = {}
        """Why modules are kept whole that would have been opened, by name."""

    def __call__(self, module: nn.Module) -> bool:
        """Whether this module of the model is kept whole."""
        return module is not self._model and (
            module in self._blocks or not _can_be_opened(module) or any(module is m for m in self._kept())
        )

    def keep(self, name: str, reason: str) -> None:
        """Keep this module whole from now on."""
        self.reasons[name] = reason

    def _kept(self) -> Iterator[nn.Module]:
        return (self._model.get_submodule(name) for name in self.reasons)


def _can_be_opened(module: nn.Module) -> bool:
    if not any(True for _ in module.children()) or is_parametrized(module) or is_recomputed(module):
        return False
    if "forward" in vars(module) or has_hooks(module):
        return False
    return type(module) in _OPEN or not type(module).__module__.startswith("torch.")


def has_hooks(module: nn.Module) -> bool:
    """Whether something else happens when the module is called."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module).get(kind) for kind in kinds)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    repeats = Counter(type(child) for child in children if _has_layers(child))
    for child in children:
        if repeats[type(child)] > 1 and not _lists_blocks(child):
            yield child
        else:
            yield from _blocks(child)


def _has_layers(module: nn.Module) -> bool:
    """Whether this is a layer made of layers, not just a container."""
    return type(module) not in _LISTS and any(True for _ in module.children())


def _lists_blocks(module: nn.Module) -> bool:
    """Whether there is a container inside with several blocks of one class."""
    lists = [inner for inner in module.modules() if isinstance(inner, _LISTS)]
    kinds = [Counter(type(child) for child in one.children() if _has_layers(child)) for one in lists]
    return any(count > 1 for kind in kinds for count in kind.values())
