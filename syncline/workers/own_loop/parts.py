"""The models, optimizers, schedulers and scalers of a script.

Here: `PreparedParts`, which registers them as the script prepares them, in as many calls as it likes, and presents them
to checkpoints and recovery as one model and one optimizer. Not here: what their methods do (`optimizer.py`,
`training.py`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from syncline.compute.local_hook import LocalHook, register_local_hook
from syncline.errors import ConfigError
from syncline.workers.own_loop.groups import ParameterGroups
from syncline.workers.own_loop.lateness import is_late
from syncline.workers.own_loop.optimizer import OptimizerGroup, PreparedOptimizer, prepare_optimizer
from syncline.workers.own_loop.scheduler import prepare_scheduler
from syncline.workers.own_loop.values import SavedValues, ScriptParts

if TYPE_CHECKING:
    from syncline.workers.own_loop.training import LoopTraining


class PreparedParts:
    """What a script has prepared so far."""

    def __init__(self, training: LoopTraining) -> None:
        self._training = training
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[Any] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.values = SavedValues(self._before_values)
        self.groups = ParameterGroups(self)
        self.script = ScriptParts(self.values, self.scalers, training.round, self.groups)
        self._model: nn.Module | None = None

    def _before_values(self) -> None:
        """A resumed run has values from before; a replacement gets them when it joins."""
        training = self._training
        if self.optimizers and not training.is_entered and not is_late(training.session):
            training.enter()

    def add(self, thing: Any) -> bool:
        """Register an object that is not data. False if it is of no kind that can be prepared."""
        if isinstance(thing, nn.Module):
            self._check_early("model")
            thing.to(self._training.session.device)
            if not any(thing is model for model in self.models):
                self.models.append(thing)
                register_local_hook(thing, LocalHook(lambda _: self._training.on_forward()))
        elif isinstance(thing, torch.optim.Optimizer):
            self._check_early("optimizer")
            self._add_optimizer(thing)
        elif isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
            self._check_early("scheduler")
            self.schedulers.append(prepare_scheduler(thing, self._has_more_steps))
        elif isinstance(thing, torch.amp.GradScaler):
            self.scalers.append(thing)
        else:
            return False
        return True

    def _has_more_steps(self) -> bool:
        """Whether the run has made steps for samples of a failed worker."""
        return self._training.is_entered and self._training.progress.position.extra > 0

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if any(optimizer is prepared for prepared in self.optimizers):
            return
        self.optimizers.append(prepare_optimizer(optimizer, self._training.updates, len(self.optimizers)))
        method = self._training.session.strategy.method
        if len(self.optimizers) > 1 and self._training.session.plan.size > 1 and not self._training.is_lock_step:
            raise ConfigError(
                f"The script prepares {len(self.optimizers)} optimizers. With several, each step must combine the "
                f"gradients of all workers, and {method.title} does not. Use --strategy allreduce.",
                code="several-optimizers",
                optimizers=len(self.optimizers),
            )

    def _check_early(self, what: str) -> None:
        if self._training.is_entered:
            raise ConfigError(
                f"prepare got a {what} after the training had begun. Prepare all models, optimizers and schedulers "
                "before the first batch; DataLoaders for evaluation may come later.",
                code="prepared-late",
                what=what,
            )

    def check(self) -> None:
        """Refuse a script without anything to train."""
        if not self.optimizers:
            raise ConfigError(
                "The script has prepared no optimizer, so no step would be shared by the workers. Call "
                "model, optimizer, batches = worker.prepare(model, optimizer, loader) before the loop.",
                code="prepare-objects",
                what="optimizer",
                count=0,
            )
        parameters = self.parameters()
        trained = [p for model in self.models for p in model.parameters() if p.requires_grad]
        if not any(p.requires_grad for p in parameters):
            count = len(parameters)
            raise ConfigError(
                f"The optimizer has {count} parameters, and all of them are frozen, so no step can change anything. "
                "Set requires_grad=True on the parameters to train.",
                code="nothing-to-train",
                parameters=count,
            )
        held = {id(p) for p in parameters}
        if trained and not any(id(p) in held for p in trained):
            raise ConfigError(
                "The prepared optimizer has none of the prepared model's parameters, so it would not train the model. "
                "Make the optimizer from model.parameters() of the same model.",
                code="other-parameters",
            )

    def check_used(self, is_entered: bool) -> None:
        """At the end of the script: refuse one that has not trained with the other workers."""
        if self.models or self.optimizers:
            if not is_entered and self.optimizers and not is_late(self._training.session):
                raise ConfigError(
                    "The script ended without a step of the prepared optimizer and without taking a batch from the "
                    "prepared loader, so nothing was trained. Iterate over the loader that prepare returned.",
                    code="never-trained",
                )
            return
        raise ConfigError(
            "The script ended without calling worker.prepare(model, optimizer, loader), so each worker trained "
            "alone. Add the two lines from the README, train with torch.distributed as under torchrun, or start it "
            "with plain python.",
            code="not-prepared",
        )

    @property
    def model(self) -> nn.Module:
        """All models and all parameters that are in no model, as one."""
        if self._model is None:
            inside = {id(p) for model in self.models for p in model.parameters()}
            outside = [p for p in self.parameters() if id(p) not in inside]
            is_single = len(self.models) == 1 and not outside
            self._model = self.models[0] if is_single else _Everything(self.models, outside)
        return self._model

    def models_in(self, copied: nn.Module) -> list[nn.Module]:
        """The models in a copy of `model`, in their order."""
        names = {id(module): name for name, module in self.model.named_modules()}
        return [copied.get_submodule(names[id(model)]) for model in self.models]

    @property
    def optimizer(self) -> Any:
        """All optimizers, as one where a checkpoint expects one."""
        return self.optimizers[0] if len(self.optimizers) == 1 else OptimizerGroup(list(self.optimizers))

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all optimizers."""
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(p.grad is not None for p in self.parameters())

    def number_of(self, parameters: list[Any]) -> list[int]:
        """The optimizers that have any of these parameters."""
        wanted = {id(p) for p in parameters}
        return [
            number
            for number, optimizer in enumerate(self.optimizers)
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
        ]

    def copy_state(self, number: int) -> tuple[list[torch.Tensor], dict[str, Any]] | None:
        """The parameters and state of an optimizer, if a failure can interrupt its step."""
        if self._training.session.plan.size == 1:
            return None
        optimizer = self.optimizers[number]
        parameters = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        return parameters, copy.deepcopy(optimizer.state_dict())

    def load_state(self, number: int, saved: tuple[list[torch.Tensor], dict[str, Any]] | None) -> None:
        """Restore the parameters and state that `copy_state` returned."""
        if saved is None:
            return
        optimizer = self.optimizers[number]
        with torch.no_grad():
            for p, values in zip((p for g in optimizer.param_groups for p in g["params"]), saved[0], strict=True):
                p.copy_(values)
        optimizer.load_state_dict(saved[1])


class _Everything(nn.Module):
    """Several models, and parameters that are in none of them."""

    def __init__(self, models: list[nn.Module], parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(f"model{number}" if number else "model", model)
        for number, parameter in enumerate(parameters):
            if isinstance(parameter, nn.Parameter):
                self.register_parameter(f"parameter{number}", parameter)
            else:  # an optimizer takes any tensor that requires a gradient
                self.register_buffer(f"parameter{number}", parameter)
