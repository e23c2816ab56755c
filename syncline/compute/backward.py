"""A backward pass that begins with given gradients.

Here: `seeded`. torch's own functions take such gradients as arguments, but then import SymPy to compare shapes, at the
first call: a second in which a worker trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        return (None, *ctx.gradients)


def seeded(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A scalar whose backward pass is that of `outputs` with these `gradients`."""
    scalar: Tensor = _Seeded.apply(tuple(gradients), *outputs)  # type: ignore[no-untyped-call]
    return scalar
