"""Numbers and tensors of a script, combined over all workers.

Here: `Numbers`: sums, means, gathered tensors, decisions. They are exchanged as values of a round, so that a failure in
between is recovered from where the script is. Not here: the round (`workers/rounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from syncline.comms.serialize import dump_state, load_state
from syncline.errors import ConfigError
from syncline.workers.own_loop.training import LoopTraining

Number = TypeVar("Number", float, torch.Tensor)


class Numbers:
    """Combines the values of a script with those of the other workers; all of them call the same methods."""

    def __init__(self, training: LoopTraining) -> None:
        self._training = training
        self._samples = 0  # of the batch that was taken last
        self._in_pass: int | None = None  # of the evaluation so far
        self._weight = 0
        self._is_uncombined = self._has_warned = False

    def begin_batch(self, samples: int) -> None:
        """A batch of this many samples was taken."""
        self._samples = self._weight = samples
        if self._in_pass is not None:
            self._in_pass += samples

    def begin_pass(self) -> None:
        """An evaluation begins: its samples are counted."""
        self._in_pass = 0

    def end_pass(self, *, is_divided: bool = False) -> None:
        """An evaluation has ended: until the next batch, means are over all of its samples."""
        self._weight, self._in_pass = self._in_pass or 0, None
        self._is_uncombined = is_divided and not self._has_warned

    def warn_if_uncombined(self) -> None:
        """The script trains on, and has combined nothing since an evaluation that was divided among the workers."""
        if not self._is_uncombined:
            return
        self._is_uncombined, self._has_warned = False, True
        self._training.session.warn(
            "An evaluation was divided among the workers, but its results were not combined: what the script printed "
            "is of one worker's part. Use worker.sum, worker.mean or worker.gather, or do not prepare that DataLoader."
        )

    def holders(self) -> tuple[int, ...]:
        """The worker_ids among which an evaluation is divided.

        On record, like the results of exchanges: a replacement that repeats the evaluation has an assignment of its own
        by then, and would otherwise divide it among others than the workers that have done it.
        """
        found: list[int] = self._exchange(lambda: list(self._training.progress.holders))
        return tuple(found)

    def members(self) -> list[int]:
        """The worker_ids that have come here; after a failure, those that are left."""
        session = self._training.session

        def perform() -> list[int]:
            session.collective.barrier()
            return list(session.members)

        found: list[int] = self._exchange(perform)
        return found

    def sum(self, value: Any) -> Any:
        """The sum over all workers."""
        parts = self.gather_parts(_as_tensor(value))
        return _like(value, torch.stack([part.to(parts[0].dtype) for part in parts]).sum(0))

    def mean(self, value: Any, weight: float | None) -> Any:
        """The mean over all workers, each weighted by its number of samples, or by `weight`."""
        own = float(self._weight or 1) if weight is None else float(weight)
        if self._training.order is None and weight is None:
            own = 1.0
        tensor = _as_tensor(value).double()
        parts = self.gather_parts(torch.cat([tensor.reshape(-1), tensor.new_tensor([own])]))
        total = torch.zeros_like(parts[0][:-1])
        for part in parts:
            if part[-1] > 0:  # what a worker without samples computed is nothing
                total += part[:-1] * part[-1]
        weights = sum(float(part[-1]) for part in parts)
        if not weights:
            raise ConfigError("worker.mean: the weights of all workers are zero.", code="no-weights")
        return _like(value, (total / weights).reshape(tensor.shape))

    def gather(self, value: Any) -> Any:
        """The values of all workers in the order of their ranks: tensors joined along their first dimension."""
        parts = self.gather_parts(_as_tensor(value))
        return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])

    def any(self, condition: Any) -> bool:
        """Whether the condition holds on any worker."""
        return any(bool(part) for part in self.gather_parts(torch.tensor(bool(condition))))

    def gather_parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all workers, on the CPU."""
        self._is_uncombined = False
        payload = dump_state(tensor.detach().cpu())
        collective = self._training.session
        parts: list[torch.Tensor] = self._exchange(
            lambda: [load_state(part) for part in collective.collective.all_gather(payload)]
        )
        return parts

    def gather_values(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """The plain values and tensors of all workers."""
        payload, session = dump_state(value), self._training.session
        parts: list[dict[str, Any]] = self._exchange(
            lambda: [load_state(part) for part in session.collective.all_gather(payload)]
        )
        return parts

    def _exchange(self, perform: Callable[[], Any]) -> Any:
        training = self._training
        if training.is_catching_up or not training.parts.optimizers:
            return self._alone(perform)
        training.enter()
        training.begin_without_data()
        if training.is_asynchronous and training.progress.position.cursor:
            raise ConfigError(
                "The script combines numbers of all workers in the middle of an epoch, but with this strategy each "
                "worker is at its own step. Combine them between epochs, or use a synchronous strategy such as "
                "allreduce.",
                code="not-together",
            )
        training.session.recorder.waits = True
        return training.round.exchange_values(perform, training.recover)

    def _alone(self, perform: Callable[[], Any]) -> Any:
        """Before a worker has come to where the others are, its own values are all there are."""
        from syncline.comms.collective import Solo

        session = self._training.session
        before, session.collective = session.collective, Solo()
        try:
            return perform()
        finally:
            session.collective = before


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value) if isinstance(value, float) else value, dtype=_dtype_of(value))
    if hasattr(value, "__array__"):
        return torch.as_tensor(value)
    raise ConfigError(
        f"worker.sum, mean and gather take numbers and tensors, not a {type(value).__name__}.",
        code="not-a-number",
        type=type(value).__name__,
    )


def _dtype_of(value: float) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64


def _like(value: Any, result: torch.Tensor) -> Any:
    """The result as what the script passed: a number or a tensor of the same type and device."""
    if isinstance(value, torch.Tensor):
        dtype = value.dtype if value.is_floating_point() or not result.is_floating_point() else result.dtype
        return result.to(value.device, dtype)
    if isinstance(value, int) and not result.is_floating_point():
        return int(result)
    return float(result) if result.dim() == 0 else result
