"""`pipeline(n)`: n workers hold one replica together; each computes some of its layers, on all samples of the replica.

Which worker holds what: the layers of one stage, with their gradients and optimizer state. What moves: activations from
stage to stage, and their gradients back, one micro-batch at a time (`stage_runner.py`). What is repaired when a worker
is lost: its part of the update in flight, from a log; the state itself lies in memory that all workers of the replica
map, and outlives the worker. Here: the declaration, and the number of micro-batches. Not here: where a model is cut
(`cut.py`), and the order of the micro-batches (`schedule.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.errors import UnknownName
from syncline.layouts.grid import Grid
from syncline.layouts.part import LayoutPart, invalid
from syncline.layouts.schedule import SCHEDULES, bubble

__all__ = ["Pipeline"]

_PER_STAGE = 4
"""Micro-batches per stage, by default: a fifth of the time at most is lost in the bubble."""


@dataclass(frozen=True)
class Pipeline(LayoutPart):
    """n workers compute a replica's layers one after another, several micro-batches at a time."""

    name: ClassVar[str] = "pipeline"
    n: int | None = 2
    schedule: str = "1f1b"
    """The order of the micro-batches: 1f1b, or gpipe."""
    cut: str = "auto"
    """Where each later stage begins: names of layers, joined by +. By default, where the stages take equally long."""
    micro_batches: int | None = None
    """Into how many micro-batches a share is divided."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n is None:
            raise invalid(self.name, "n=None", "it needs a number of stages, 2 or more")
        if self.schedule not in SCHEDULES:
            raise UnknownName.among("schedule", self.schedule, SCHEDULES)
        if self.micro_batches is not None and self.micro_batches < 1:
            raise invalid(self.name, f"micro_batches={self.micro_batches}", "a share is at least one micro-batch")

    @property
    def stages(self) -> int:
        assert self.n is not None, "checked when it was made"
        return self.n

    def micro_batches_of(self, samples: int, *, is_whole: bool) -> int:
        """Into how many micro-batches a share of so many samples is divided; one if statistics need the whole share.

        It does not depend on how many workers there are at the moment, so that the result does not, either.
        """
        wanted = self.micro_batches or (1 if is_whole else _PER_STAGE * self.stages)
        return max(1, min(wanted, samples))

    def explain(self, grid: Grid, parameter_bytes: int) -> list[str]:
        count = self.micro_batches or _PER_STAGE * self.stages
        return [
            f"Each replica is cut into {grid.stages} stages that take equally long, as measured before the first step; "
            f"about {2 * parameter_bytes / grid.stages / 1e6:,.1f} MB of parameters and gradients per worker instead "
            f"of {2 * parameter_bytes / 1e6:,.1f} MB, and as much less optimizer state.",
            f"A share is computed in up to {count} micro-batches ({self.schedule}), so that {grid.stages} stages "
            f"work at the same time: {bubble(grid.stages, count):.0%} of the time is lost in the bubble. A model with "
            "batch norm is computed in one, because its statistics are over the whole share.",
            "If a worker fails, its layers are still in the memory that its replica shares; the step in flight is "
            "repeated, or its update completed by another worker.",
        ]
