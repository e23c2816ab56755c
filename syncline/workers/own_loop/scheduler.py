"""Learning-rate schedules that end after a fixed number of steps, in runs that may need more.

When a worker fails, the steps that make up for its samples come on top of those that the script counts on. OneCycleLR
raises an error if it is advanced beyond its end. Here: `prepare_scheduler`, after which such a schedule stays at its
end in additional steps. In a run without a failure it raises as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Bounded:
    """A mixin. Schedulers get a class with it by assignment, so that their `state_dict` stays as it is."""

    last_epoch: int
    total_steps: int
    syncline_has_more_steps: Callable[[], bool]

    def step(self, *arguments: Any, **options: Any) -> None:
        if self.last_epoch >= self.total_steps and type(self).syncline_has_more_steps():
            return
        super().step(*arguments, **options)  # type: ignore[misc]  # of the scheduler's own class


def prepare_scheduler(scheduler: Any, has_more_steps: Callable[[], bool]) -> Any:
    """The same object; `has_more_steps` says whether the run has made steps that the script does not count on."""
    if isinstance(getattr(scheduler, "total_steps", None), int) and not isinstance(scheduler, _Bounded):
        plain = type(scheduler)
        names = {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
            "syncline_has_more_steps": staticmethod(has_more_steps),
        }
        scheduler.__class__ = type(plain.__name__, (_Bounded, plain), names)
    return scheduler
