"""Learning-rate schedules by name: those of torch.optim.lr_scheduler."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.optim import lr_scheduler

from syncline.models.catalog.lookup import subclasses_in

_MADE_OF_CODE = {"lr_lambda", "schedulers"}
"""Arguments that are functions or schedules, which cannot be written in a run file."""


@functools.cache
def table() -> dict[str, Any]:
    return subclasses_in(lr_scheduler, lr_scheduler.LRScheduler)


def listed() -> dict[str, Any]:
    """The schedules that can be written in a run file."""
    return {
        name: found for name, found in table().items() if not _MADE_OF_CODE & set(inspect.signature(found).parameters)
    }
