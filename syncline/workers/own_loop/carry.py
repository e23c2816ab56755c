"""`worker.carry`: the hidden state of a recurrent network, in a loop that stays as it is.

Here: `CarriedThrough`, which takes the new state from the result of a model's forward pass. Not here: the state of all
workers, and what happens when one of them fails (`carried.py`).

The workers must have the new state before the update of the same batch counts, and the script passes it on only in the
next batch. But a prepared model has returned it by then: among the tensors of its result, those that have the shapes
of the state. That they are what the script passes on is checked in the next batch, so a wrong guess ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from syncline.compute.local_hook import LocalResultHook, register_local_result_hook
from syncline.errors import ConfigError
from syncline.workers.own_loop.carried import Carried, leaves, rebuilt
from syncline.workers.own_loop.numbers import Numbers
from syncline.workers.own_loop.training import LoopTraining

_INSTEAD = "Use worker.carried, and assign the new state to its value."


class _Returned(NamedTuple):
    """The state that a model has returned, in an epoch."""

    epoch: int
    tensors: list[torch.Tensor]
    versions: list[int]

    def is_in(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the script passes on these tensors, detached or not, and has not changed them."""
        return len(given) == len(self.tensors) and all(
            a.data_ptr() == b.data_ptr() and a.shape == b.shape and a._version == version
            for a, b, version in zip(given, self.tensors, self.versions, strict=True)
        )


class CarriedThrough:
    """State that prepared models get and return, batch after batch; initial at the start of each epoch."""

    def __init__(self, training: LoopTraining, numbers: Numbers, initial: Any, dim: int) -> None:
        if training.order is None or training.share is None:
            raise ConfigError(
                "worker.carry was called before the script took a batch. Call it in the loop over the batches of a "
                "prepared DataLoader or of worker.batches.",
                code="carried-without-batch",
            )
        self._training = training
        self._carried = Carried(training, numbers, initial, dim, training.order.steps_per_epoch)
        self._initial = [t.detach().clone() for t in leaves(initial)]
        self._lent: list[torch.Tensor] | None = None  # to the forward pass of this batch
        self._returned: _Returned | None = None
        training.parts.script.add_carried(self._carried.table)
        for model in training.parts.models:
            handle = register_local_result_hook(model, LocalResultHook(self._take_result))
            training.on_end.append(handle.remove)

    def next(self, given: Any) -> Any:
        """The state for this worker's samples of the current batch; `given` is initial, or what a model returned."""
        self._check(leaves(given))
        value = self._carried.value
        self._lent = leaves(value)
        return rebuilt(given, iter(self._lent))

    def _take_result(self, result: Any) -> None:
        if self._lent is None or not torch.is_grad_enabled():
            return
        found = _last_like(self._lent, leaves(result))
        if found is not None:
            self._carried.value = rebuilt(self._carried.structure, iter(found))
            self._returned = _Returned(self._epoch, [t.detach() for t in found], [t._version for t in found])

    @property
    def _epoch(self) -> int:
        return self._training.state.epochs_closed

    def _check(self, given: list[torch.Tensor]) -> None:
        is_first = self._returned is None or self._returned.epoch != self._epoch
        if self._returned is not None and self._returned.is_in(given):
            if is_first:
                raise ConfigError(
                    "worker.carry got the state from the end of the epoch before. It begins each epoch with the "
                    f"initial state. {_INSTEAD}",
                    code="carried-over-epochs",
                )
        elif not is_first or not _are_equal(given, self._initial):
            shapes = [tuple(t.shape) for t in given]
            raise ConfigError(
                f"worker.carry got a state of the shapes {shapes} that no prepared model has returned in the batch "
                "before, and that is not the initial state of the whole batch, which is the same in every epoch. Pass "
                f"the state that the model returned, unchanged. {_INSTEAD}",
                code="carried-changed",
                shapes=shapes,
            )


def _last_like(state: Sequence[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """The last tensors that follow each other and have the shapes of the state: (output, hidden) is torch's order."""
    shapes = [(t.shape, t.dtype) for t in state]
    for start in range(len(results) - len(shapes), -1, -1):
        found = results[start : start + len(shapes)]
        if [(t.shape, t.dtype) for t in found] == shapes:
            return found
    return None


def _are_equal(given: Sequence[torch.Tensor], initial: Sequence[torch.Tensor]) -> bool:
    return len(given) == len(initial) and all(torch.equal(a, b) for a, b in zip(given, initial, strict=True))
