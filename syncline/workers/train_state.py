"""Model, optimizer and schedulers being trained.

Here: `TrainState`, its conversion to the checkpoint schema, and how an interrupted step is undone. Not here: where the
run is in its data (`data_progress.py`), and which worker's state counts (`state_sync.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from syncline.checkpoint.schema import TrainingProgress, TrainingState
from syncline.compute.tuning import Tuning
from syncline.errors import ANOTHER_MODEL, CheckpointError


class ScriptValues(Protocol):
    """What a user's own script keeps besides its models, optimizers and schedulers."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, which a checkpoint can hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def fit_optimizer(self, saved: dict[str, Any], script: dict[str, Any] | None) -> dict[str, Any]:
        """An optimizer's state for the parameter groups that the script has; it may add some later.

        Those that were there when `script`, a `state_dict`, was saved are made; without it, none are.
        """

    def groups_in(self, script: dict[str, Any] | None) -> list[dict[str, Any]]:
        """The parameter groups that were there when `script`, a `state_dict`, was saved."""


class Parts(NamedTuple):
    """A model with its optimizer and schedulers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: Sequence[LRScheduler] = ()
    script: ScriptValues | None = None


class TrainState:
    """The parts that `build` makes, and the numbers that go with them."""

    def __init__(self, build: Callable[[], Parts]) -> None:
        self._build = build
        self.tuning: Tuning | None = None
        """How the model is computed, once that is decided. It survives a restart from scratch."""
        self._initialize()

    def _initialize(self) -> None:
        self.model, self.optimizer, self.schedulers, self._script = self._build()
        self.metrics: dict[str, float] = {}
        self.epochs_closed = 0
        """The number of epochs whose end was handled: evaluation, schedule."""
        self.evaluated_at = -1
        self._is_untrained = True
        self._saved_buffers: list[_SavedBuffer] | None = None
        self._is_in_step = self._has_round_start = False

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def reset(self) -> None:
        """Return to the state before the first step."""
        if not self._is_untrained:
            self._initialize()

    def begin_step(self, *, may_fail: bool) -> None:
        """Save the buffers: the forward pass changes running statistics, and an interrupted step must not."""
        self._is_untrained = False
        if not may_fail:
            return
        if self._saved_buffers is None:
            self._saved_buffers = [_SavedBuffer(flat) for flat in _flattened(self.model.buffers())]
        for saved in self._saved_buffers:
            saved.save()
        self._is_in_step = self._has_round_start = True

    def begin_round(self) -> None:
        """A user's own loop begins a round; until its first step, the buffers are those that the round began with."""
        self._has_round_start = False

    def end_step(self) -> None:
        self._is_in_step = False

    def undo_step(self) -> None:
        """Restore the buffers if a step was interrupted."""
        if self._is_in_step:
            for saved in self._saved_buffers or ():
                saved.restore()
        self._is_in_step = False

    @contextmanager
    def as_before_round(self) -> Iterator[None]:
        """A context in which the buffers are those that the round of a user's own loop began with.

        Also if its update is made: a replacement repeats the round, and with it the changes of running statistics.
        """
        if not self._has_round_start:
            yield
            return
        saved = self._saved_buffers or []
        current = [buffer.swap() for buffer in saved]
        try:
            yield
        finally:
            for buffer, values in zip(saved, current, strict=True):
                buffer.put_back(values)

    def state(self) -> TrainingState:
        return TrainingState(
            **self.progress().to_dict(), model=self.model.state_dict(), optimizer=self.optimizer.state_dict()
        )

    def progress(self) -> TrainingProgress:
        return TrainingProgress(
            schedulers=[scheduler.state_dict() for scheduler in self.schedulers],
            learning_rates=[group["lr"] for group in self.optimizer.param_groups],
            metrics=dict(self.metrics),
            epochs_closed=self.epochs_closed,
            evaluated_at=self.evaluated_at,
            tuning=self.tuning.to_dict() if self.tuning is not None else None,
            script=self._script.state_dict() if self._script is not None else None,
        )

    def load(self, state: TrainingState) -> None:
        self._load_model_and_optimizer(state, state.script)
        self.load_progress(state)

    def load_tensors(self, state: TrainingState) -> None:
        """Load model and optimizer only, and keep the settings of the parameter groups, such as learning rates."""
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self._load_model_and_optimizer(state)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)

    def _load_model_and_optimizer(self, state: TrainingState, script: dict[str, Any] | None = None) -> None:
        self._is_untrained = False
        load_model(self.model, state.model)
        try:
            saved = state.optimizer
            self.optimizer.load_state_dict(saved if self._script is None else self._script.fit_optimizer(saved, script))
        except (ValueError, KeyError, TypeError) as error:
            raise _of_another_task(f"Its optimizer does not fit: {error}.") from error

    def load_progress(self, progress: TrainingProgress) -> None:
        self.load_schedule(progress)
        self.metrics = dict(progress.metrics)
        self.epochs_closed, self.evaluated_at = progress.epochs_closed, progress.evaluated_at
        if progress.tuning is not None:
            self.tuning = Tuning.from_dict(progress.tuning)
        if self._script is not None and progress.script is not None:
            self._script.load_state_dict(progress.script)

    def load_schedule(self, progress: TrainingProgress) -> None:
        """Load the schedulers and learning rates only."""
        if len(self.schedulers) != len(progress.schedulers):
            raise _of_another_task(f"It has {len(progress.schedulers)} schedules instead of {len(self.schedulers)}.")
        groups = self.optimizer.param_groups if self._script is None else self._script.groups_in(progress.script)
        if len(groups) != len(progress.learning_rates):
            raise _of_another_task("Its optimizer has another number of parameter groups.")
        for scheduler, saved in zip(self.schedulers, progress.schedulers, strict=True):
            scheduler.load_state_dict(saved)
        for group, lr in zip(groups, progress.learning_rates, strict=True):
            group["lr"] = lr


def load_model(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors of a checkpoint; `CheckpointError` says how they differ if they are another model's."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    there = {name: tuple(tensor.shape) for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}
    missing, unknown = [n for n in own if n not in there], [n for n in there if n not in own]
    shapes = [n for n in own if n in there and own[n] != there[n]]
    try:
        model.load_state_dict(saved)
    except RuntimeError as error:  # its message lists every key of both
        differences = [f"{name!r} has the shape {there[name]} instead of {own[name]}" for name in shapes[:1]]
        differences += [f"it lacks {missing[0]!r}{_and_more(missing)}"] if missing else []
        differences += [f"it has {unknown[0]!r}{_and_more(unknown)}, which this model has not"] if unknown else []
        why = "; ".join(differences) or str(error).partition("\n")[0]
        raise _of_another_task(f"In it, {why}.", missing=missing, unknown=unknown, shapes=shapes) from error


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _of_another_task(how: str, **facts: list[str]) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint is of another model or optimizer than this task's. {how} Resume it with the task that it was "
        "saved with, or start a new run.",
        code=ANOTHER_MODEL,
        **facts,
    )


class _SavedBuffer:
    """A flat tensor with a copy of it that is renewed in every step, where each microsecond counts.

    Copying a memoryview takes 4 us in the middle of training, NumPy or torch 20: their code has left the caches since
    the previous step.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat, self._copy = flat, torch.empty_like(flat)
        is_on_cpu = flat.device.type == "cpu"
        self._views = (_bytes_of(self._copy), _bytes_of(flat)) if is_on_cpu else None

    def save(self) -> None:
        if self._views is not None:
            copy, current = self._views
            copy[:] = current
        else:
            self._copy.copy_(self._flat)

    def restore(self) -> None:
        self._flat.copy_(self._copy)

    def swap(self) -> torch.Tensor:
        """Restore; what was there before, for `put_back`."""
        current = self._flat.clone()
        self.restore()
        return current

    def put_back(self, values: torch.Tensor) -> None:
        self._flat.copy_(values)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _flattened(buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Move the buffers into flat tensors, one for each dtype and device, so that saving them is a copy or two.

    The buffers keep their identity, because layers and users hold references to them. Not one tensor for all dtypes:
    torch refuses to save tensors that share memory but differ in dtype.
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
