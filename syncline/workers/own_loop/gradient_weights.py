"""The weights of accumulated gradients.

Here: `GradientWeights`. A worker's gradient of a batch is the mean over its own part, and counts by the size of that
part. When a script accumulates the gradients of several batches, the parts may be of different sizes: then what is
there already is rescaled, so that one weight is right for all of it. Not here: what the weights are
(`updates.weight_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class GradientWeights:
    """The weight that the gradients of this worker have now.

    `is_summed`: the script's loss is a sum over samples, not a mean, so that each worker's gradient counts in full.
    """

    def __init__(self) -> None:
        self.is_summed = False
        self._weight: float | None = None  # of the gradients so far
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def begin(self) -> None:
        """The gradients have been applied: what follows is new."""
        self._weight, self._kept = None, None

    def forget(self) -> None:
        """The script has set the gradients to zero; the batch that it took last is still to come."""
        if self._kept is not None:
            self._kept = [(p, None) for p, _ in self._kept]

    def take(self, weight: float, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """The script takes a batch of which this worker has the part `weight`; its gradients may be added to others."""
        if weight == 0.0:
            # The batch has one sample, for its shape only: what it adds to the gradients is taken back.
            self._kept = [(p, None if p.grad is None else p.grad.clone()) for p in parameters()]
            return
        if self._weight is not None and self._weight != weight and not self.is_summed:
            for p in parameters():
                if p.grad is not None:
                    p.grad.mul_(self._weight / weight)
        self._weight = weight

    def end_batch(self) -> None:
        """The gradients of the batch are complete."""
        kept, self._kept = self._kept, None
        for p, grad in kept or ():
            if p.grad is not None:
                p.grad = torch.zeros_like(p.grad) if grad is None else grad

    def of_gradients(self, weight: float, accumulated: int | None, batches: int) -> float:
        """The weight of what is accumulated; `weight` is that of the last batch, with the members of this View.

        With `accumulated`, it is the mean over the `batches` taken.
        """
        if self.is_summed:
            own = 0.0 if self._weight is None and weight == 0.0 else 1.0
        else:
            own = weight if weight else self._weight or 0.0
        return own / batches if accumulated is not None and batches else own
