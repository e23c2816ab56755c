"""Tuning the computation of a user's own loop: memory format, convolutions, threads.

Here: `LoopTuner`. In one of the first steps it keeps what the script passes to its models. Before the next step it
measures on a copy of the models, with these inputs, which tuning is fastest, as the built-in loop does before its first
step. The script's own models run no additional forward pass, and its parameters stay in the memory format they have.
Not here: how it is measured (`workers/calibrate.py`) and applied (`workers/tuning.py`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from syncline.comms.collective import Solo
from syncline.compute.batch_norm import synchronize_batch_norm
from syncline.compute.forward_scope import ForwardScope
from syncline.compute.local_hook import LocalHook, register_local_hook
from syncline.compute.tuning import Tuning
from syncline.data.random_state import seeded
from syncline.workers.calibrate import CalibrationTrial, find_tuning, has_choice
from syncline.workers.tuning import planned, use_in_forward

if TYPE_CHECKING:
    from syncline.workers.own_loop.training import LoopTraining

_FIRST = 8
"""After how many steps a script is tuned, if its epochs are long."""
_SHORT = 100
"""In epochs of fewer steps, a script is tuned after so many: a shorter one would not make up for the time it takes."""
_TOLERANCE = 1e-3
"""The tolerated difference between losses: rounding is less, and random numbers in another order are more."""
_TRIES = 3
"""In how many steps the models may go without a forward pass before tuning is given up."""


class _Call(NamedTuple):
    """What a script has passed to a model."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    samples: int

    def part(self, fraction: float) -> _Call:
        """The same with a part of the samples."""
        samples = max(1, round(fraction * self.samples))

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            is_of_samples = tensor.dim() > 0 and len(tensor) == self.samples
            return (tensor[:samples] if is_of_samples else tensor).detach().requires_grad_(tensor.requires_grad)

        arguments, options = pytree.tree_map_only(torch.Tensor, cut, (self.arguments, self.options))
        return _Call(arguments, options, samples)


class _Keep(LocalHook):
    """A hook that keeps what a model is called with; copies of the model have one that keeps nothing."""

    def __init__(self, calls: dict[int, _Call] | None = None, number: int = 0) -> None:
        self._calls, self._number = calls, number

    def __call__(  # type: ignore[override]  # a hook that gets keyword arguments, too
        self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if self._calls is None or self._number in self._calls or not (model.training and torch.is_grad_enabled()):
            return
        tensors = [leaf for leaf in pytree.tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor)]
        if tensors:
            self._calls[self._number] = _Call(arguments, options, len(tensors[0]) if tensors[0].dim() else 1)

    def __reduce__(self) -> Any:
        return _Keep, ()


class _Offer(msgspec.Struct, frozen=True):
    """What a worker brings when all of them enter a View: the tuning it has, or after which step it will measure."""

    tuning: dict[str, Any] | None = None
    first: int | None = None


class LoopTuner:
    """One worker's side of tuning a script."""

    def __init__(self, training: LoopTraining) -> None:
        self._training = training
        self._scope = ForwardScope()
        self._calls: dict[int, _Call] = {}  # of each model, what the script has passed to it first
        self._hooks: list[Any] = []
        self._first: int | None = None  # after how many steps to measure, once that is agreed
        self._applied: Tuning | None = None

    @property
    def _is_possible(self) -> bool:
        return bool(self._training.session.plan.measured)

    def enter_view(self) -> None:
        """Compute as the other members do; all of them call this together."""
        if not self._is_possible:
            return
        training, state = self._training, self._training.state
        plan = training.session.plan
        if state.tuning is None and not has_choice(plan, training.parts.model, has_slow_data=False):
            state.tuning = planned(plan)
        if training.is_lock_step:
            self._agree()
        elif self._first is None:
            self._first = self._first_step()
        self._apply()

    def _agree(self) -> None:
        """One tuning for all, so that a replacement computes the same bits as the worker that it replaces."""
        training, state = self._training, self._training.state
        mine = _Offer(None if state.tuning is None else state.tuning.to_dict(), self._first)
        gathered = training.session.collective.all_gather(msgspec.msgpack.encode(mine))
        offers = [msgspec.msgpack.decode(data, type=_Offer) for data in gathered]
        known = next((offer.tuning for offer in offers if offer.tuning is not None), None)
        state.tuning = None if known is None else Tuning.from_dict(known)
        self._first = min((offer.first for offer in offers if offer.first is not None), default=self._first_step())

    def _first_step(self) -> int:
        order = self._training.order
        is_long = order is not None and order.steps_per_epoch >= _SHORT
        return max(_FIRST if is_long else _SHORT, self._training.round.steps + 1)

    def before_round(self) -> None:
        """Between two steps: measure, if it is time; raises `PeerFailed` if another worker fails meanwhile."""
        first, training = self._first, self._training
        if first is None or training.state.tuning is not None or training.round.steps < first - 1:
            return
        if not self._hooks:
            self._watch_calls()
        if training.round.steps >= first:
            self._measure(first)

    def _watch_calls(self) -> None:
        """Keep what the script passes to its models from now on."""
        for number, model in enumerate(self._training.parts.models):
            self._hooks.append(register_local_hook(model, _Keep(self._calls, number), with_kwargs=True))

    def _stop_watching(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._calls.clear()

    def _measure(self, first: int) -> None:
        training = self._training
        training.session.recorder.waits = True  # measuring takes longer than a step
        is_alone = not training.is_lock_step
        trial = self._trial()
        collective = Solo() if is_alone else training.session.collective
        ready = [bytes(data) == b"1" for data in collective.all_gather(b"1" if trial is not None else b"0")]
        if not all(ready) and training.round.steps < first + _TRIES:
            return
        plan = training.session.plan
        found = None
        if trial is not None and all(ready):
            batch = training.order.batch if training.order is not None else trial.samples * plan.size
            with seeded(0):
                found = find_tuning(training.session, trial, batch=batch, is_alone=is_alone, checks_cache=True)
        training.state.tuning = planned(plan, found)
        self._stop_watching()
        self._apply()

    def _apply(self) -> None:
        tuning, parts = self._training.state.tuning, self._training.parts
        if tuning is None or tuning == self._applied:
            return
        use_in_forward(parts.model, tuning, self._scope)
        self._scope.watch(parts.models if tuning.memory_format == "channels-last" else ())
        self._applied = tuning

    def _trial(self) -> CalibrationTrial | None:
        """What is to be measured; None if the script has called no model, or its models cannot be copied."""
        calls = dict(self._calls)
        if not calls:
            return None
        try:
            model = _copy(self._training.parts.model)
        except Exception:
            return None
        models = self._training.parts.models_in(model)
        scope = ForwardScope()
        samples = max(call.samples for call in calls.values())

        def loss_of(copied: nn.Module, batch: dict[int, _Call]) -> torch.Tensor:
            with scope.active(copied):
                return sum((_loss(models[n](*c.arguments, **c.options)) for n, c in batch.items()), torch.zeros(()))

        return CalibrationTrial(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            loss_of,
            lambda wanted: {number: call.part(wanted / samples) for number, call in calls.items()},
            samples=samples,
            device=self._training.session.device,
            lay_out=lambda copied, _, tuning: use_in_forward(copied, tuning, scope),
            tolerance=_TOLERANCE,
        )


def _copy(model: nn.Module) -> nn.Module:
    """A copy without hooks, of the script or ours, whose batch norm exchanges nothing."""
    without: dict[int, Any] = {
        id(hooks): OrderedDict()
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
    }
    return synchronize_batch_norm(copy.deepcopy(model, without), Solo())


def _loss(outputs: Any) -> torch.Tensor:
    """Any loss will do to measure a backward pass; the script's own is not known."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError("the outputs have no gradients")
    return sum((leaf.float().square().mean() for leaf in leaves), torch.zeros(()))
