"""Initial weights, penalties and constraints of a layer.

Here: which of a layer's parameters each setting applies to. Parameters other than biases are weights. A setting of the
model applies to weights with at least two dimensions, so not to the scales of normalization layers; a setting of a
layer applies to all of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from syncline.errors import ConfigError
from syncline.models.catalog import initializers, regularizers
from syncline.models.catalog.lookup import find
from syncline.models.declared.call import Call
from syncline.models.declared.declaration import WeightSettings

PenaltyTerm = tuple[str, Callable[..., torch.Tensor], Call]
"""The path of a weight in the model, and its penalty."""


def initialize(module: nn.Module, own: WeightSettings, common: WeightSettings) -> None:
    """Initialize weights and biases; torch's defaults remain where nothing is set."""
    for call, is_bias, least in (
        (own.init, False, 0), (None if own.init else common.init, False, 2),
        (own.bias_init, True, 0), (None if own.bias_init else common.bias_init, True, 0),
    ):  # fmt: skip
        if call is None:
            continue
        fill = find("initializer", initializers.ALIASES.get(call.name, call.name), initializers.table())
        for _, _, parameter in _parameters(module, is_bias=is_bias, least_dims=least):
            if parameter.is_meta:
                continue  # only the shape matters
            _called(call, fill, parameter)


def penalty_terms(path: str, module: nn.Module, own: WeightSettings, common: WeightSettings) -> list[PenaltyTerm]:
    """The penalties on the weights of a layer that is at `path` in the model."""
    terms: list[PenaltyTerm] = []
    for calls, least in ((own.regularizer, 0), (() if own.regularizer else common.regularizer, 2)):
        for call in calls:
            penalty = find("regularizer", call.name, regularizers.penalties())
            for holder, name, parameter in _parameters(module, is_bias=False, least_dims=least):
                _called(call, penalty, parameter)
                terms.append((".".join(filter(None, (path, holder, name))), penalty, call))
    return terms


def constrain(module: nn.Module, own: WeightSettings, common: WeightSettings) -> None:
    """Apply the constraints to the weights."""
    for calls, least in ((own.constraint, 0), (() if own.constraint else common.constraint, 2)):
        for call in calls:
            constraint = find("constraint", call.name, regularizers.constraints())
            for holder, name, _ in list(_parameters(module, is_bias=False, least_dims=max(least, 2))):
                owner = module.get_submodule(holder)
                if isinstance(owner, nn.RNNBase):
                    raise ConfigError("The weights of torch's recurrent layers cannot be constrained.")
                _called(call, constraint, owner, name)


def _parameters(module: nn.Module, *, is_bias: bool, least_dims: int) -> Iterator[tuple[str, str, nn.Parameter]]:
    """The module inside `module` that has the parameter, the parameter's name in it, and the parameter."""
    for path, parameter in module.named_parameters():
        holder, _, name = path.rpartition(".")
        if ("bias" in name) == is_bias and parameter.dim() >= least_dims:
            yield holder, name, parameter


def _called(call: Call, function: Callable[..., Any], *first: Any) -> Any:
    try:
        return function(*first, *call.arguments, **call.options)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        shape = f" for a weight of shape {tuple(first[0].shape)}" if isinstance(first[0], torch.Tensor) else ""
        raise ConfigError(f"{call} failed{shape}: {error}.") from error
