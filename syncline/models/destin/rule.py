"""The optimizer of a DeSTIN network: it applies the sums of a mini-batch.

Here: `ClusterRule`. What it remembers is in the parameters themselves (wins, starvation), so it has no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from syncline.models.destin import cells, transitions

__all__ = ["ClusterRule"]


class ClusterRule(torch.optim.Optimizer):
    """Each parameter's `.grad` holds sums over the samples of a step, in its own form."""

    def __init__(self, layers: Iterable[nn.Module], rates: cells.Rates) -> None:
        layers = list(layers)
        tables = [layer.table for layer in layers if layer.table is not None]
        # A learning rate is what schedules and reports know of an optimizer; these rates are in `rates`.
        groups: list[dict[str, Any]] = [{"params": [layer.cells for layer in layers], "lr": 1.0}]
        if tables:
            groups.append({"params": tables, "lr": 1.0})
        super().__init__(groups, {})
        self._rates = rates

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        """Update all parameters that have sums."""
        assert closure is None, "the built-in loop has none"
        clusters, *tables = self.param_groups
        for parameter in clusters["params"]:
            if parameter.grad is not None:
                cells.learn(parameter, parameter.grad, self._rates)
        for parameter in [p for group in tables for p in group["params"]]:
            if parameter.grad is not None:
                transitions.learn(parameter, parameter.grad)
        return None
