"""External code that runs at the beginning of every step.

The environment variable SYNCLINE_STEP_HOOK names a function as `module:function`. Each worker calls it once; the hook
that it returns, unless None, runs in every step. Fault injection enters workers here (`lab/faults/`), so that
nothing in a worker imports it.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Protocol

VARIABLE = "SYNCLINE_STEP_HOOK"


class StepHook(Protocol):
    """A hook that runs at the beginning of every step."""

    def at_step(self, worker_id: int, step: int, run_dir: Path) -> None:
        """Called before worker `worker_id` begins `step`; an exception ends the worker."""


@functools.cache
def step_hook() -> StepHook | None:
    """The hook of this process, loaded once."""
    target = os.environ.get(VARIABLE)
    if not target:
        return None
    module, _, function = target.partition(":")
    hook: StepHook | None = getattr(importlib.import_module(module), function)()
    return hook
