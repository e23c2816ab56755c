"""One worker's loss and accuracy in a step, summed over its micro-batches.

Here: `LossTally`. The accuracy is only displayed, and costs as much as an update, so it is not computed in every step.
Not here: the sum over all workers (`update.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from syncline.workers.forward import correct_fraction


class Local(NamedTuple):
    """This worker's own results in a step."""

    loss: float
    correct: float | None


class LossTally:
    """Sums what micro-batches give; `with_accuracy` in the same steps on all workers, or their sum would be wrong."""

    def __init__(self, *, with_accuracy: bool) -> None:
        self.with_accuracy = with_accuracy
        self._loss, self._correct = 0.0, 0.0
        self._fraction: float | None = None

    def add(self, loss: torch.Tensor, output: Any, target: Any, part: float) -> None:
        """A micro-batch with this fraction of the samples."""
        self._loss += float(loss.detach()) * part
        if self.with_accuracy:
            self._fraction = correct_fraction(output, target)
            self._correct += (self._fraction or 0.0) * part

    def result(self) -> Local:
        return Local(self._loss, None if self._fraction is None else self._correct)
