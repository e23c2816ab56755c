"""Which steps the workers of a replica have committed to, in memory that all of them map.

Here: `CommitJournal`. A worker that dies leaves its row behind, so that the survivors know which of its updates count.
Not here: completing an update (`optimizer_shards.py`).
"""

from __future__ import annotations

import torch

_STEP, _UPDATES = 0, 1
"""Columns: the step that a worker has committed to, and whether it updates in it."""


class CommitJournal:
    """The rows of `size` workers in `memory`, of which this one writes the row `rank`."""

    def __init__(self, memory: torch.Tensor, rank: int, step: int) -> None:
        self._rows = memory.view(-1, 2).numpy()
        self._own = self._rows[rank]
        self._own[:] = (step, 0)

    @staticmethod
    def numbers_needed(size: int) -> int:
        return 2 * size

    def note(self, step: int, *, updates: bool) -> None:
        """This worker has committed to `step`."""
        self._own[_UPDATES] = updates
        self._own[_STEP] = step

    @property
    def own_step(self) -> int:
        return int(self._own[_STEP])

    @property
    def last_step(self) -> int:
        """The last step to which any worker has committed."""
        return int(self._rows[:, _STEP].max())

    @property
    def is_update(self) -> bool:
        """Whether workers update in the last step."""
        last = self.last_step
        return any(row[_STEP] == last and row[_UPDATES] for row in self._rows)
