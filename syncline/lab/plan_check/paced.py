"""`Paced`: a model that exchanges like another one, but sleeps instead of computing.

With more workers than cores, real models would slow each other down, as they would not on machines of their own. This
one has the parameters of the model that it stands for, and its passes take as long as is asked, without a core.
Its gradients are zeros, so it learns nothing.

Here: the model. Not here: how long the other one's passes take (`cells.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class _Pass(torch.autograd.Function):
    """Sleeps in both directions, and gives every parameter a gradient."""

    @staticmethod
    def forward(ctx: Any, forward_s: float, backward_s: float, inputs: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.backward_s = backward_s
        ctx.save_for_backward(*parameters)
        time.sleep(forward_s)
        return inputs.new_zeros(len(inputs), 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del gradients
        time.sleep(ctx.backward_s)
        found = (torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
        return None, None, None, *found


class Paced(nn.Module):
    """`forward_s` and `backward_s` for a share of any size."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        for name, shape in shapes.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(*shape)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Pass.apply(self.forward_s, self.backward_s, inputs, *self.parameters())  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True)
class MakePaced:
    """Makes the model on each worker."""

    shapes: Mapping[str, Sequence[int]]
    forward_s: float
    backward_s: float

    __name__ = "paced"

    def __call__(self) -> Paced:
        return Paced(self.shapes, self.forward_s, self.backward_s)


def paced_data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Something to train on."""
    return torch.zeros(samples, 2), torch.zeros(samples, dtype=torch.long)
