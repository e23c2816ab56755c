"""What a run makes better: a model, its optimiser, schedulers, and the numbers that go with them.

Here: `Trained`, its state as it is saved and given to others, and how a step that came to nothing is undone. Not here:
where the run is in its data, and who has which state (`course.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from syncline.plan.tuning import Tuning

__all__ = ["Parts", "Trained"]


class Parts(NamedTuple):
    """A model with its optimiser and schedulers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: Sequence[LRScheduler] = ()


class Trained:
    """The parts that `make` makes, in the course of being trained."""

    def __init__(self, make: Callable[[], Parts]) -> None:
        self._make = make
        self.tuning: Tuning | None = None
        """How it is computed, once that is decided. It stays so, also for who starts over or goes on later."""
        self._begin()

    def _begin(self) -> None:
        self.model, self.optimizer, self.schedulers = self._make()
        self.metrics: dict[str, float] = {}
        self.epochs_closed = 0
        """How many epochs were seen off, with all that is done after one."""
        self.evaluated_at = -1
        self._is_pristine = True
        self._statistics: list[_Kept] | None = None
        self._is_in_step = False

    @property
    def lr(self) -> float:
        """The learning rate now."""
        return float(self.optimizer.param_groups[0]["lr"])

    def start_over(self) -> None:
        """Be as before the first step."""
        if not self._is_pristine:
            self._begin()

    def begin_step(self, *, may_fail: bool) -> None:
        """A forward pass changes running statistics; if the step comes to nothing, that must, too."""
        self._is_pristine = False
        if not may_fail:
            return
        if self._statistics is None:
            self._statistics = [_Kept(flat) for flat in _flattened(self.model.buffers())]
        for kept in self._statistics:
            kept.keep()
        self._is_in_step = True

    def end_step(self) -> None:
        """The step counts."""
        self._is_in_step = False

    def forget_step(self) -> None:
        """A step that came to nothing leaves nothing behind."""
        if self._is_in_step:
            for kept in self._statistics or ():
                kept.restore()
        self._is_in_step = False

    def whole_state(self) -> dict[str, Any]:
        """Everything."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **self.progress_state(),
        }

    def progress_state(self) -> dict[str, Any]:
        """How far it is: everything but model and optimiser."""
        return {
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "lrs": [group["lr"] for group in self.optimizer.param_groups],
            "metrics": dict(self.metrics),
            "epochs_closed": self.epochs_closed,
            "evaluated_at": self.evaluated_at,
            "tuning": self.tuning and self.tuning.to_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `whole_state` told."""
        self._is_pristine = False
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_progress(state)

    def load_progress(self, state: dict[str, Any]) -> None:
        """Be as far as `progress_state` told."""
        self.load_schedule(state)
        self.metrics = dict(state["metrics"])
        self.epochs_closed, self.evaluated_at = state["epochs_closed"], state["evaluated_at"]
        if state.get("tuning") is not None:
            self.tuning = Tuning.from_dict(state["tuning"])

    def load_schedule(self, state: dict[str, Any]) -> None:
        """Be as far in the schedule as `progress_state` told."""
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        for group, lr in zip(self.optimizer.param_groups, state["lrs"], strict=True):
            group["lr"] = lr


class _Kept:
    """Numbers of which a copy is kept in every step, where each microsecond counts.

    The copy of a memoryview takes 4 us in the middle of training, one of NumPy or torch 20: their code has left the
    caches since the step before.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat, self._before = flat, torch.empty_like(flat)
        is_here = flat.device.type == "cpu"
        self._views = (_bytes_of(self._before), _bytes_of(flat)) if is_here else None

    def keep(self) -> None:
        """As it is now."""
        if self._views is not None:
            before, now = self._views
            before[:] = now
        else:
            self._before.copy_(self._flat)

    def restore(self) -> None:
        """As it was when it was kept."""
        self._flat.copy_(self._before)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _flattened(buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Move the buffers into flat tensors, one for each dtype and device, so that keeping them is a copy or two.

    They stay the objects that they are, for whoever holds them. Not one tensor for all: torch saves no two tensors that
    have their memory in common and not their dtype.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.numel() and buffer.layout == torch.strided:
            by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    flats = []
    for members in by_kind.values():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in members])
        offset = 0
        for buffer in members:
            buffer.data = flat[offset : offset + buffer.numel()].view(buffer.shape)
            offset += buffer.numel()
        flats.append(flat)
    return flats
