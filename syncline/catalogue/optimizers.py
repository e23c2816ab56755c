"""Optimisers by name: those of torch.optim, and those of `syncline.optimizers`."""

from __future__ import annotations

import functools

import torch

import syncline.optimizers
from syncline.catalogue.lookup import subclasses_in

__all__ = ["table"]


@functools.cache
def table() -> dict[str, type[torch.optim.Optimizer]]:
    """All but LBFGS, which needs several evaluations in one step."""
    found = {**subclasses_in(torch.optim, torch.optim.Optimizer)}
    found.pop("LBFGS", None)
    return {**found, **{name: getattr(syncline.optimizers, name) for name in syncline.optimizers.__all__}}
