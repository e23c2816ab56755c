"""The optimizer of a whole replica, as a strategy sees it, where several workers update parts of it.

Here: `ReplicaOptimizer`, which the first worker of a replica gives to the strategy. Its `step` makes all workers of the
replica update, its state is that of the whole model. Not here: the parts (`optimizer_shards.py`), and how the workers
learn that they are to update (`between_replicas.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from syncline.layouts.optimizer_shards import OptimizerShards


class ReplicaOptimizer(torch.optim.Optimizer):
    """Stands for `optimizer`, of which `shards()` is this worker's part; `update` is what a step does."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, shards: Callable[[], OptimizerShards | None], update: Callable[[], None]
    ) -> None:
        # Not the constructor of torch's class: this one has no parameters of its own.
        self._optimizer, self._shards, self._update = optimizer, shards, update
        self._is_current = False
        self.pending: dict[str, Any] | None = None
        """What was loaded, and is not yet with all workers of the replica."""

    def step(self, closure: Any = None) -> Any:
        """Let all workers of the replica update what they own."""
        assert closure is None, "strategies have computed the gradients before"
        self._update()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @property
    def state(self) -> dict[Any, dict[str, Any]]:  # type: ignore[override]
        """What is remembered of each parameter, where it lies: it may be changed in place."""
        with self._whole():
            return {p: dict(slots) for p, slots in self._optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        with self._whole():
            return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it when all workers of the replica can, before the next step."""
        if not self._is_current:
            self.pending = state_dict

    @contextmanager
    def undivided(self) -> Iterator[torch.optim.Optimizer]:
        """A context in which the optimizer that this one stands for has whole parameters."""
        with self._whole():
            yield self._optimizer

    @contextmanager
    def keeping_state(self) -> Iterator[None]:
        """A context in which nothing is loaded: the workers of the replica have that state already."""
        self._is_current = True
        try:
            yield
        finally:
            self._is_current = False

    def _whole(self) -> Any:
        shards = self._shards()
        return shards.whole() if shards is not None and shards.is_split else nullcontext()
