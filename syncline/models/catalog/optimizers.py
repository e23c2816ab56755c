"""Optimizers by name: those of torch.optim, and those of `syncline.models.optimizers`."""

from __future__ import annotations

import functools

import torch

import syncline.models.optimizers
from syncline.models.catalog.lookup import subclasses_in


@functools.cache
def table() -> dict[str, type[torch.optim.Optimizer]]:
    """All but LBFGS, which needs several evaluations in one step."""
    found = {**subclasses_in(torch.optim, torch.optim.Optimizer)}
    found.pop("LBFGS", None)
    return {**found, **{name: getattr(syncline.models.optimizers, name) for name in syncline.models.optimizers.__all__}}
