"""Layers by name: the modules of torch.nn, and those of `syncline.models.layers`.

Here: which there are, and what their arguments are. Not here: activations (`activations.py`; they are layers too, and
`usable` has them), and which arguments follow from the input's shape (`models/declared/sizes.py`).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from syncline.models import layers
from syncline.models.catalog import activations
from syncline.models.catalog.lookup import subclasses_in

_NOT_BY_NAME = {
    "Container", "DataParallel", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential",
    "RNNBase", "RNNCellBase",
    "SyncBatchNorm",  # batch norm is over the global batch anyway
    "AdaptiveLogSoftmaxWithLoss",  # its loss is inside
    "MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d",  # they need the indices besides the values
}  # fmt: skip
"""Containers, base classes, and modules that do not map tensors to tensors."""


@functools.cache
def usable() -> dict[str, type[nn.Module]]:
    return {**names(), **activations.table()}


@functools.cache
def names() -> dict[str, type[nn.Module]]:
    """The layers that are not activations or losses."""
    not_layers = {*_NOT_BY_NAME, *torch.nn.modules.loss.__all__, *activations.table()}
    of_torch = {
        name: found
        for name, found in subclasses_in(nn, nn.Module).items()
        if name not in not_layers and not name.startswith("Lazy") and not _takes_modules(found)
    }
    return {**of_torch, **{name: getattr(layers, name) for name in layers.__all__}}


def joining() -> list[str]:
    """The layers that join branches."""
    return list(layers.JOINS)


def signature_of(layer: type[nn.Module]) -> inspect.Signature:
    """The arguments of a layer; torch's recurrent layers hide theirs in a base."""
    if issubclass(layer, nn.RNNBase):
        own = list(inspect.signature(nn.RNNBase).parameters.values())[1:]  # without the mode
        names = {"nonlinearity"} if layer is nn.RNN else set()
        more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default="tanh") for n in names]
        return inspect.Signature([*own, *more])
    return inspect.signature(layer)


def _takes_modules(layer: type[nn.Module]) -> bool:
    """Whether it takes another module as argument, such as TransformerEncoder."""
    first: Any = next(iter(inspect.signature(layer).parameters.values()), None)
    return first is not None and first.name in ("encoder_layer", "decoder_layer")
