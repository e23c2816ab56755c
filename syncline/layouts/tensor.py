"""`tensor(n)`: n workers hold one replica together; each computes a slice of every large layer, on all samples.

Which worker holds what: some rows of each large layer, with their gradients and optimizer state; small layers are
computed by all. What moves: the outputs of divided layers and the gradients of their inputs, gathered in memory that
the workers share (`divided_model.py`). What is repaired when a worker is lost: its part of the update in
flight, from a log; the state itself outlives the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.layouts.grid import Grid
from syncline.layouts.part import LayoutPart, invalid

__all__ = ["Tensor"]


@dataclass(frozen=True)
class Tensor(LayoutPart):
    """n workers compute each large layer of a replica together."""

    name: ClassVar[str] = "tensor"
    n: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n is None:
            raise invalid(self.name, "n=None", "it needs a number of workers, 2 or more")

    @property
    def slices(self) -> int:
        assert self.n is not None, "checked when it was made"
        return self.n

    def explain(self, grid: Grid, parameter_bytes: int) -> list[str]:
        return [
            f"Each large layer is divided by its outputs over {grid.slices} workers: about "
            f"{2 * parameter_bytes / grid.slices / 1e6:,.1f} MB of parameters and gradients per worker instead of "
            f"{2 * parameter_bytes / 1e6:,.1f} MB, and as much less optimizer state. Small layers are computed by all.",
            "If a worker fails, its slices are still in the memory that its replica shares; the step in flight is "
            "repeated, or its update completed by another worker.",
        ]
