"""How the model is spread over the workers of one View.

Here: `ModelSpread`: what each lane of the grid computes gradients for, and what this worker computes. It is made before
the model moves to shared memory, and is the same on all workers but for the rank. Not here: the memory and the update
(`shared_model.py`), and where a model is cut (`cut.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from syncline.comms.collective import Collective
from syncline.layouts.grid import Cell, Grid
from syncline.layouts.shards import Leaf, whole_leaves
from syncline.layouts.stage_runner import StagedModel, StageRunner
from syncline.layouts.tensor_split import Split, row_pieces


@dataclass
class ModelSpread:
    """The places of all workers, and what the one at `rank` holds."""

    grid: Grid
    rank: int
    staged: StagedModel | None = None
    """The model as a sequence of stages, if it has more than one."""
    split: Split | None = None
    """Which layers are divided among the slices, if there are several."""
    divided: frozenset[int] = frozenset()
    """The parameters of those layers, by identity."""
    has_accuracy: bool = False
    """Whether the model classifies: then the last stage reports an accuracy."""
    runner: StageRunner | None = None
    """Computes this worker's stage; opened with the View."""

    @property
    def cell(self) -> Cell | None:
        return self.grid.cell(self.rank)

    def lanes(self, parameters: Sequence[nn.Parameter]) -> list[list[Leaf]]:
        """Of each lane, the parts of the `parameters` whose gradients it computes and whose numbers it updates."""
        whole = whole_leaves([p.numel() for p in parameters])
        owned = [range(len(parameters))] if self.staged is None else self.staged.owned(parameters)
        if self.split is None:
            return [[whole[n] for n in own] for own in owned]
        return [lane for own in owned for lane in self._slices(parameters, whole, own)]

    def _slices(
        self, parameters: Sequence[nn.Parameter], whole: Sequence[Leaf], own: Sequence[int]
    ) -> list[list[Leaf]]:
        """What each slice of a stage has of the parameters with the numbers in `own`."""
        assert self.split is not None, "checked before"
        is_divided = [id(parameters[n]) in self.divided for n in own]
        slices = row_pieces([parameters[n].shape for n in own], is_divided, self.grid.slices)
        starts = list(itertools.accumulate((parameters[n].numel() for n in own), initial=0))
        return [
            [
                Leaf(own[leaf.parameter], leaf.low - shift, leaf.high - shift)
                for leaf in leaves
                for shift in [starts[leaf.parameter] - whole[own[leaf.parameter]].low]
            ]
            for leaves in slices
        ]

    def open(self, team: Collective) -> None:
        """Connect this worker with those that compute the same samples; they call this together."""
        if self.staged is not None and self.cell is not None:
            self.runner = StageRunner(self.staged, self.cell.stage, team)
