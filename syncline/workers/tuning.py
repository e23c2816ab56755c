"""Applying a `Tuning`, and agreeing on one with the other workers.

Here: memory formats, autocast, and `settle`, by which all members of a View use the same tuning. Not here: which tuning
is best (`compute/tuning.py`, `calibrate.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import msgspec
import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.compute.convolutions import use_algorithms
from syncline.compute.forward_scope import ForwardScope, keep_dropout_masks
from syncline.compute.pooling import preserve_memory_format, use_pool_algorithms
from syncline.compute.tuning import Tuning
from syncline.planning.plan import Plan

_FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}


def planned(plan: Plan, found: Tuning | None = None) -> Tuning:
    """The plan's settings, and what was `found` where the plan leaves a choice."""
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
    """The tuning that a member already has, or the one that all members `find` together."""
    gathered = collective.all_gather(msgspec.msgpack.encode(mine and mine.to_dict()))
    known = next((tuning for tuning in map(msgspec.msgpack.decode, gathered) if tuning is not None), None)
    return find() if known is None else Tuning.from_dict(known)


def lay_out(model: nn.Module, optimizer: torch.optim.Optimizer, tuning: Tuning) -> None:
    """Apply the tuning's memory format, algorithms and number of threads to a model.

    The optimizer's state gets the memory format of the parameters: fused optimizers iterate over raw memory.
    """
    if tuning.threads is not None:
        torch.set_num_threads(tuning.threads)
    model.to(memory_format=_FORMATS[tuning.memory_format])  # type: ignore[call-overload]  # missing in torch's types
    preserve_memory_format(model)
    use_algorithms(model, tuning.layers)
    use_pool_algorithms(model, tuning.layers)
    for p, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape and value.stride() != p.stride():
                kept[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)


def use_in_forward(model: nn.Module, tuning: Tuning, scope: ForwardScope) -> None:
    """Apply a tuning to a model of a user's own loop.

    Channels-last memory is used inside of `scope` only: the script's code keeps the memory format that it knows.
    """
    if tuning.threads is not None:
        torch.set_num_threads(tuning.threads)
    is_channels_last = tuning.memory_format == "channels-last"
    use_algorithms(model, tuning.layers, scope=scope if is_channels_last else None)
    use_pool_algorithms(model, tuning.layers)
    if is_channels_last:
        preserve_memory_format(model)
        keep_dropout_masks(model)


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Autocast for bf16; weights and updates stay float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
