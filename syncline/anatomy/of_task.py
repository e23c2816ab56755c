"""The anatomy of the model that a task would train."""

from __future__ import annotations

import copy

import torch

from syncline.anatomy.examine import Anatomy, examine
from syncline.errors import ConfigError
from syncline.task import LocatedData, Task
from syncline.workers.build import build_model, build_sources

__all__ = ["anatomy_of"]


def anatomy_of(task: Task) -> Anatomy:
    """The model that `task` would train, seen with one sample of its data."""
    source, _ = build_sources(task)
    batch = source.fetch([0])
    sample = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(sample, torch.Tensor):
        raise ConfigError(f"A sample of this data begins with {type(sample).__name__}; a tensor can be shown.")
    model = copy.deepcopy(build_model(task, source, seed=0)).to("meta")
    facts = task.facts()
    name = task.data.name if isinstance(task.data, LocatedData) else facts.data
    return examine(model, sample.to("meta"), title=f"{facts.model} on {name}")
