"""Losses by name: functions of torch.nn.functional, classes of torch.nn, and those of `syncline.models.losses`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from syncline.models import losses


@functools.cache
def functions() -> dict[str, Callable[..., torch.Tensor]]:
    """Losses that are functions of output and target."""
    without_suffix = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
    of_torch = {
        name: function
        for name, function in vars(torch.nn.functional).items()
        if callable(function) and (name in without_suffix or name.endswith("_loss")) and name[0] != "_"
    }
    return {**of_torch, **_own(), "mean_output": losses.mean_output}  # not listed: for few models


@functools.cache
def classes() -> dict[str, type[nn.Module]]:
    return {name: getattr(nn, name) for name in torch.nn.modules.loss.__all__ if hasattr(nn, name)}


def listed() -> dict[str, Any]:
    """The losses that need only a name: of one output and one target, with defaults for all options."""
    return {**{name: found for name, found in classes().items() if _is_of_two(found)}, **_own()}


def _own() -> dict[str, Callable[..., torch.Tensor]]:
    return {name: getattr(losses, name) for name in losses.__all__}


def _is_of_two(loss: type[nn.Module]) -> bool:
    needs = [p for p in inspect.signature(loss).parameters.values() if p.default is p.empty and p.kind < 2]
    takes = list(inspect.signature(loss.forward).parameters)[1:]
    is_another = any(other is not loss and issubclass(loss, other) for other in classes().values())  # an old name
    return not needs and len(takes) == 2 and not is_another
