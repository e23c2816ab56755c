"""How a worker computes: carrying out a `Tuning`, and agreeing on one with the others.

Here: memory formats, autocast, and `settle`, by which all members of a View compute in the same way. Not here: which
tuning is best (`plan/tuning.py`, `calibrate.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import msgspec
import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.plan.plan import Plan
from syncline.plan.tuning import Tuning
from syncline.workers.convolutions import choose
from syncline.workers.max_pooling import choose_pools
from syncline.workers.pooling import keep_format

__all__ = ["computing_in", "lay_out", "planned", "settle"]

_FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}


def planned(plan: Plan, found: Tuning | None = None) -> Tuning:
    """What the plan says, and where it leaves a choice, what was found."""
    if found is None:
        return Tuning(memory_format=plan.memory_format, precision=plan.precision)
    return replace(
        found,
        memory_format=found.memory_format if "memory-format" in plan.measured else plan.memory_format,
        precision=found.precision if "precision" in plan.measured else plan.precision,
        threads=found.threads if "threads" in plan.measured else None,
        loaders=found.loaders if "loaders" in plan.measured else None,
        layers=found.layers if "convolutions" in plan.measured else {},
    )


def settle(collective: Collective, mine: Tuning | None, find: Callable[[], Tuning]) -> Tuning:
    """The tuning that one of the members has from before, or the one that they `find` together."""
    told = [msgspec.msgpack.decode(data) for data in collective.gather(msgspec.msgpack.encode(mine and mine.to_dict()))]
    known = next((data for data in told if data is not None), None)
    return find() if known is None else Tuning.from_dict(known)


def lay_out(model: nn.Module, optimizer: torch.optim.Optimizer, tuning: Tuning) -> None:
    """Bring the model into the tuning's memory format, its layers to their ways, and take its number of threads.

    What the optimiser keeps is laid out as its parameters are: fused optimisers go through memory as it lies.
    """
    if tuning.threads is not None:
        torch.set_num_threads(tuning.threads)
    model.to(memory_format=_FORMATS[tuning.memory_format])  # type: ignore[call-overload]  # missing in torch's types
    keep_format(model)
    choose(model, tuning.layers)
    choose_pools(model, tuning.layers)
    for p, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape and value.stride() != p.stride():
                kept[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Autocast, where it is wanted. Weights and updates are float32 all the same."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
