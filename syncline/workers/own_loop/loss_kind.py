"""Whether a loss is a mean over the samples of a batch or their sum, as its graph shows.

Here: `is_sum`, a guess that is right for torch's own losses. It matters because each worker computes the loss of its
own part of a batch: means are averaged over workers, sums must be added up.
"""

from __future__ import annotations

from typing import Any

import torch

_MEAN, _SUM = 1, 2
"""How torch numbers the reductions of its losses."""
_COMBINING = ("AddBackward0", "SubBackward0", "NegBackward0")


def is_sum(loss: torch.Tensor) -> bool:
    """Whether `loss` is a sum over samples: torch's losses with reduction='sum', or a bare `.sum()`.

    Terms may be added up and multiplied by constants. A division says nothing: it may make a mean of a sum.
    """
    if loss.grad_fn is None or loss.dim() != 0:
        return False
    terms = _terms(loss.grad_fn)
    reductions = [getattr(term, "_saved_reduction", None) for term in terms]
    if _MEAN in reductions or any(term.name().startswith("MeanBackward") for term in terms):
        return False
    return _SUM in reductions or (len(terms) == 1 and terms[0].name() == "SumBackward0")


def _terms(node: Any) -> list[Any]:
    """The nodes whose results are added up to the loss."""
    found: list[Any] = []
    queue = [node]
    while queue and len(found) < 32:
        current = queue.pop()
        inner = [parent for parent, _ in current.next_functions if parent is not None]
        is_scaled = current.name() == "MulBackward0" and len(inner) == 1
        if current.name() in _COMBINING or is_scaled:
            queue += inner
        else:
            found.append(current)
    return found
