"""What `syncline.worker()` offers for numbers of all workers.

Here: `CombinedNumbers`, the methods of a script. Not here: how the values are exchanged (`numbers.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from syncline.workers.own_loop.numbers import Numbers


class CombinedNumbers:
    """Sums, means, tensors and decisions of all workers."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def sum(self, value: Any) -> Any:
        """The sum of a number or tensor over all workers; all of them call this."""
        return self._numbers.sum(value)

    def mean(self, value: Any, weight: float | None = None) -> Any:
        """The mean of a number or tensor over all workers, weighted by the samples it was computed from.

        Those are the samples of the current batch, or after an evaluation all of its samples; `weight` says otherwise.
        """
        return self._numbers.mean(value, weight)

    def gather(self, value: Any) -> torch.Tensor:
        """The tensors of all workers, joined along their first dimension in the order of the samples of a batch."""
        gathered: torch.Tensor = self._numbers.gather(value)
        return gathered

    def any(self, condition: Any) -> bool:
        """Whether a condition holds on any worker: `if worker.any(bad): continue` skips a step on all of them."""
        return self._numbers.any(condition)
