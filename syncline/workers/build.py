"""From the names in a task to torch objects.

Here: making models, losses, optimisers and schedules that a task names. Not here: which names there are
(`catalogue/`), metrics (`metrics.py`), data that is known by name (`data/named.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.catalogue import losses, optimizers, schedules
from syncline.catalogue.lookup import check_options, construct, find, key
from syncline.config.spec import Spec
from syncline.data import transforms
from syncline.data.augmented import AugmentedSource, untransformed
from syncline.data.files.source import sources as file_sources
from syncline.data.named import DataInfo, named
from syncline.data.source import ArraySource, Source, as_source, inputs_only
from syncline.declare.build import build as build_declared
from syncline.declare.declared import Declared
from syncline.declare.sizes import Sizes
from syncline.errors import ConfigError, UnknownName
from syncline.task import LocatedData, Task, made
from syncline.zoo import registry as zoo

__all__ = [
    "Loss",
    "Schedule",
    "build_loss",
    "build_model",
    "build_optimizer",
    "build_schedule",
    "build_sources",
    "class_names",
    "parameter_shapes",
]

Loss = Callable[..., torch.Tensor]


def build_sources(task: Task, seed: int = 0) -> tuple[Source, Source | None]:
    """The training data and the test data, if any; without targets if the model is to give back its input.

    `seed` decides what is random in augmentation.
    """
    train, test = _sources(task)
    if task.reconstructs:
        train, test = inputs_only(train), inputs_only(test) if test is not None else None
    if augment := transforms.parse(task.augment):
        train = AugmentedSource(train, augment, seed=seed, is_training=True)
        test = AugmentedSource(test, augment, seed=seed, is_training=False) if test is not None else None
    return train, test


def _sources(task: Task) -> tuple[Source, Source | None]:
    if isinstance(task.data, LocatedData) and task.data.survey is not None:
        in_files, own_test = file_sources(task.data.survey), task.test
        return in_files[0], as_source(made(own_test)) if own_test is not None else in_files[1]
    if isinstance(task.data, LocatedData):
        data_set = named(task.data.name, **task.data.options)
        path, scale = Path(task.data.path), task.data.info.scale
        train: Source = ArraySource(*data_set.load(path, "train"), scale=scale)
        own_test = as_source(made(task.test)) if task.test is not None else None
        return train, own_test or ArraySource(*data_set.load(path, "test"), scale=scale)
    test = as_source(made(task.test)) if task.test is not None else None
    return as_source(made(task.data)), test


def class_names(task: Task) -> list[str] | None:
    """What the classes of the data are called, if it says so."""
    names = task.data.info.class_names if isinstance(task.data, LocatedData) else None
    return list(names) if names else None


def build_model(task: Task, train: Source, seed: int) -> nn.Module:
    """The model, with weights drawn from `seed` if Syncline makes it."""
    torch.manual_seed(seed)
    if isinstance(task.model, Spec):
        input_shape, classes, vocabulary = _fit(task, train)
        return zoo.build(task.model.name, input_shape, classes, vocabulary, **dict(task.model.options))
    if isinstance(task.model, Declared):
        return build_declared(task.model, _sizes(task, train))
    model = task.model if isinstance(task.model, nn.Module) else task.model()  # type: ignore[operator]  # a Spec by now
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"The model is a {type(model).__name__}; give an nn.Module, a function that makes one, or a name."
        )
    return model


def parameter_shapes(task: Task) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters by name; no memory is taken for them if Syncline makes the model."""
    with torch.device("meta"):
        model = task.model if isinstance(task.model, nn.Module) else None
        if isinstance(task.model, Spec) and isinstance(task.data, LocatedData):
            info = task.data.info
            options = dict(task.model.options)
            model = zoo.build(task.model.name, info.input_shape, info.classes or 1, info.vocabulary, **options)
        if isinstance(task.model, Declared) and isinstance(task.data, LocatedData):
            model = build_declared(task.model, _sizes_of(task.data.info))
    if model is None:
        model = build_model(task, build_sources(task)[0], seed=0)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def build_loss(loss: Spec | Loss) -> Loss:
    """A loss by the name of a function in torch.nn.functional or of a class in torch.nn, or the callable itself."""
    if not isinstance(loss, Spec):
        return loss
    functions, classes = losses.functions(), losses.classes()
    if loss.name in functions:
        check_options(functions[loss.name], loss, skip=("input", "target"))
        return functools.partial(functions[loss.name], **loss.options)
    by_key = {key(name).removesuffix("loss"): c for name, c in classes.items()}
    found = by_key.get(key(loss.name).removesuffix("loss"))
    if found is None:
        raise UnknownName.among("loss", loss.name, [*functions, *classes])
    made: Loss = construct("loss", found, loss, ())
    return made


def build_optimizer(task: Task, model: nn.Module, *, may_fuse: bool = True) -> torch.optim.Optimizer:
    """An optimiser of the model by its name in torch.optim, or from the user's function of the parameters.

    `may_fuse`: torch may update all parameters in one operation, where it can.
    """
    wanted, parameters = task.optimizer, model.parameters()
    if not isinstance(wanted, Spec):
        if task.weight_decay is not None:
            raise ConfigError(
                "weight_decay is set beside an optimiser that is a function: set it inside that function."
            )
        made = wanted(parameters) if callable(wanted) else wanted
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"The optimiser's function returned a {type(made).__name__}, not a torch optimiser.")
        return made
    found = find("optimizer", wanted.name, optimizers.table())
    if task.weight_decay is not None:
        wanted = wanted.with_options(weight_decay=task.weight_decay)
    if may_fuse and _can_be_fused(found, wanted, model):
        wanted = wanted.with_options(fused=True)
    optimizer: torch.optim.Optimizer = construct("optimizer", found, wanted, (list(parameters),))
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"] and optimizer.defaults["momentum"]:
        # The fused step does not bear that some parameters have momentum and others, not used until now, have none.
        optimizer.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in model.parameters()})
    return optimizer


def _can_be_fused(optimizer: type, wanted: Spec, model: nn.Module) -> bool:
    """Whether the update can be one operation over all parameters, which is faster, and the user has not decided."""
    if "fused" not in inspect.signature(optimizer).parameters:
        return False
    if {"fused", "foreach", "capturable", "differentiable"} & set(wanted.options) or wanted.options.get("dampening"):
        return False
    has_sparse_gradients = any(getattr(module, "sparse", False) for module in model.modules())
    return not has_sparse_gradients and all(
        p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters()
    )


_BY_EPOCH = {"StepLR", "MultiStepLR", "ExponentialLR", "MultiplicativeLR", "LambdaLR", "ReduceLROnPlateau"}
"""Schedules that people count in epochs, as in torch's own examples; all others advance with every step."""


class Schedule:
    """A learning-rate schedule and when to advance it."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler, every: str) -> None:
        self.scheduler = scheduler
        # torch warns if nobody has called this optimiser's `step`; where servers keep the parameters, nobody does.
        vars(scheduler.optimizer)["_opt_called"] = True
        self._every = every

    def after_step(self, steps: int) -> None:
        """A step is complete, `steps` in all. Never further than that: a run that goes back a step has been there."""
        if self._every == "step" and self.scheduler.last_epoch < steps:
            self.scheduler.step()

    def after_epoch(self, loss: float) -> None:
        """An epoch is complete; `loss` is the latest there is."""
        if self._every == "epoch":
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss)
            else:
                self.scheduler.step()


def build_schedule(
    schedule: Spec | Callable[..., Any] | None, optimizer: torch.optim.Optimizer, *, total_steps: int, epochs: int
) -> Schedule | None:
    """A schedule by its name in torch.optim.lr_scheduler; lengths that are left out become the run's own."""
    if schedule is None:
        return None
    if not isinstance(schedule, Spec):
        made = schedule(optimizer)
        every = "epoch" if type(made).__name__ in _BY_EPOCH else "step"
        return Schedule(made, every)
    found = find("schedule", schedule.name, schedules.table())
    every = schedule.options.get("every", "epoch" if found.__name__ in _BY_EPOCH else "step")
    if every not in ("step", "epoch"):
        raise ConfigError(f"The schedule's option every is {every!r}; it can be 'step' or 'epoch'.")
    length = total_steps if every == "step" else epochs
    options = {k: v for k, v in schedule.options.items() if k != "every"}
    takes = inspect.signature(found).parameters
    if "T_max" in takes:
        options.setdefault("T_max", length)
    if found.__name__ == "OneCycleLR":
        options.setdefault("total_steps", length + 1)  # torch counts the learning rate before the first step, too
        options.setdefault("max_lr", optimizer.param_groups[0]["lr"])
    elif "total_iters" in takes and found.__name__ == "PolynomialLR":
        options.setdefault("total_iters", length)
    return Schedule(construct("schedule", found, Spec(schedule.name, options), (optimizer,)), every)


def _fit(task: Task, train: Source) -> tuple[tuple[int, ...], int, int | None]:
    """The shape of an input, the number of classes and, if the inputs are tokens, how many different ones there are."""
    if isinstance(task.data, LocatedData):
        info = task.data.info
        return info.input_shape, info.classes or 1, info.vocabulary  # without classes, a number is to be fitted
    batch = train.fetch([0])
    if task.reconstructs:
        inputs: torch.Tensor = batch[0] if isinstance(batch, (tuple, list)) else batch
        return tuple(inputs.shape[1:]), 1, None  # there are no classes
    if not isinstance(batch, (tuple, list)) or not isinstance(batch[0], torch.Tensor):
        raise ConfigError(
            f"The model {task.model} can be fitted to data whose samples are (input, target) pairs of tensors."
        )
    base = untransformed(train)
    if not isinstance(base, ArraySource) or len(base.tensors) < 2:
        raise ConfigError(
            f"The number of classes for {task.model} cannot be seen from this data. Give the model itself instead of "
            "its name, for example model=syncline.zoo.build('lenet', (1, 28, 28), classes=10)."
        )
    inputs, targets = base.tensors[:2]
    classes = int(targets.max()) + 1
    if inputs.is_floating_point() or base.scale is not None or inputs.shape != targets.shape:
        return tuple(batch[0].shape[1:]), classes, None
    vocabulary = max(int(inputs.max()) + 1, classes)  # each token has the token that follows it as its target
    return tuple(inputs.shape[1:]), vocabulary, vocabulary


def _sizes(task: Task, train: Source) -> Sizes:
    """What a declared model has to know of its data."""
    if isinstance(task.data, LocatedData):
        return _sizes_of(task.data.info)
    batch = train.fetch([0])
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(inputs, torch.Tensor):
        raise ConfigError(f"A declared model takes samples that begin with a tensor, not {type(inputs).__name__}.")
    base = untransformed(train)
    arrays = base.tensors if isinstance(base, ArraySource) else ()
    are_tokens = not inputs.is_floating_point()
    tokens = _different(arrays[0]) if arrays and are_tokens else None
    classes = _different(arrays[1]) if len(arrays) > 1 and not arrays[1].is_floating_point() else None
    if tokens and classes and arrays[0].shape == arrays[1].shape:  # each token's target is the one that follows it
        tokens = classes = max(tokens, classes)
    return Sizes(input_shape=tuple(inputs.shape[1:]), classes=classes, vocabulary=tokens, are_tokens=are_tokens)


def _different(numbers: torch.Tensor) -> int:
    """How many whole numbers from 0 there are."""
    return int(numbers.max()) + 1


def _sizes_of(info: DataInfo) -> Sizes:
    return Sizes(input_shape=info.input_shape, classes=info.classes, vocabulary=info.vocabulary)
