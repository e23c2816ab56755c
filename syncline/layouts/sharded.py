"""`sharded(n)`: n workers hold one replica together; each computes the whole model on a part of the samples.

Which worker holds what: parameters, gradients and optimizer state lie in memory that all of them map, and each owns an
equal part. What moves: gradients, summed in rounds during the backward pass (`gradient_rounds.py`). What is repaired
when a worker is lost: its part of the update in flight, from a log (`optimizer_shards.py`). Without n, all workers of
the run are shards of one replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.layouts.grid import Grid
from syncline.layouts.part import LayoutPart

__all__ = ["Sharded"]


@dataclass(frozen=True)
class Sharded(LayoutPart):
    """n workers hold one replica together, each an equal part of parameters, gradients and optimizer state."""

    name: ClassVar[str] = "sharded"

    def explain(self, grid: Grid, parameter_bytes: int) -> list[str]:
        whole = 2 * parameter_bytes
        return [
            "Parameters, gradients and optimizer state exist once per replica, in memory that its workers share, and "
            f"each worker updates an equal part: {whole / grid.shards / 1e6:,.1f} MB of parameters and gradients per "
            f"worker instead of {whole / 1e6:,.1f} MB, and as much less optimizer state.",
            "If a worker fails during its update, another completes it; before, all repeat the step.",
        ]
