"""The gradients of the slices that one worker has of large layers, as a lane sums them.

Here: `SliceGradients`. A slice is no parameter of the model. Each gets a parameter of its own that lies in the same
memory, and, after each backward pass, its gradient. Not here: computing with slices (`divided_model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from syncline.layouts.divided_model import TensorSplit
from syncline.layouts.shards import Leaf


class SliceGradients:
    """The `leaves` of one lane of `parameters`, which lie in `memory` one after another."""

    def __init__(self, leaves: Sequence[Leaf], parameters: Sequence[nn.Parameter], memory: torch.Tensor) -> None:
        starts, end = [], 0
        for p in parameters:
            starts.append(end)
            end += p.numel()
        self._places = [
            (parameters[leaf.parameter], leaf.low - starts[leaf.parameter], leaf.high - starts[leaf.parameter])
            for leaf in leaves
        ]
        self.parameters = [nn.Parameter(memory[leaf.low : leaf.high]) for leaf in leaves]
        """One for each leaf."""

    def take(self, divided: TensorSplit) -> None:
        """Take over what the last backward pass has left."""
        for slice_, place in zip(self.parameters, self._places, strict=True):
            slice_.grad = divided.gradient_of(*place)
        divided.zero_gradients()
