"""From the names in a task to torch objects.

Here: looking up models, losses, optimisers, schedules by torch's own names, and telling the nearest name when there is
none. Not here: metrics (`metrics.py`), data that is known by name (`data/named.py`).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.config.spec import Spec
from syncline.data.named import named
from syncline.data.source import ArraySource, Source, as_source, inputs_only
from syncline.errors import ConfigError, UnknownName, nearest
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


def build_sources(task: Task) -> tuple[Source, Source | None]:
    """The training data and the test data, if any; without targets if the model is to give back its input."""
    train, test = _sources(task)
    if task.reconstructs:
        return inputs_only(train), inputs_only(test) if test is not None else None
    return train, test


def _sources(task: Task) -> tuple[Source, Source | None]:
    if isinstance(task.data, LocatedData):
        data_set, path, scale = named(task.data.name), Path(task.data.path), task.data.info.scale
        train: Source = ArraySource(*data_set.load(path, "train"), scale=scale)
        own_test = as_source(made(task.test)) if task.test is not None else None
        return train, own_test or ArraySource(*data_set.load(path, "test"), scale=scale)
    test = as_source(made(task.test)) if task.test is not None else None
    return as_source(made(task.data)), test


def class_names(task: Task) -> list[str] | None:
    """What the classes of the data are called, if it says so."""
    names = getattr(task.data.info, "class_names", None) if isinstance(task.data, LocatedData) else None
    return list(names) if names else None


def build_model(task: Task, train: Source, seed: int) -> nn.Module:
    """The model, with weights drawn from `seed` if Syncline makes it."""
    torch.manual_seed(seed)
    if isinstance(task.model, Spec):
        input_shape, classes = _shape_and_classes(task, train)
        return zoo.build(task.model.name, input_shape, classes, **dict(task.model.options))
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
            model = zoo.build(task.model.name, info.input_shape, info.classes or 1, **dict(task.model.options))
    if model is None:
        model = build_model(task, build_sources(task)[0], seed=0)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def build_loss(loss: Spec | Loss) -> Loss:
    """A loss by the name of a function in torch.nn.functional or of a class in torch.nn, or the callable itself."""
    if not isinstance(loss, Spec):
        return loss
    functions = _functional_losses()
    if loss.name in functions:
        _check_options(functions[loss.name], loss, skip=("input", "target"))
        return functools.partial(functions[loss.name], **loss.options)
    classes = {name: getattr(nn, name) for name in torch.nn.modules.loss.__all__ if hasattr(nn, name)}
    by_key = {_key(name, "loss"): c for name, c in classes.items()}
    found = by_key.get(_key(loss.name, "loss"))
    if found is None:
        raise UnknownName.among("loss", loss.name, [*functions, *classes])
    made: Loss = _construct("loss", found, loss, ())
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
    classes = {
        n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }
    classes.pop("Optimizer")
    classes.pop("LBFGS", None)  # needs several evaluations in one step
    found = _find("optimizer", wanted.name, classes)
    if task.weight_decay is not None:
        wanted = wanted.with_options(weight_decay=task.weight_decay)
    if may_fuse and _can_be_fused(found, wanted, model):
        wanted = wanted.with_options(fused=True)
    optimizer: torch.optim.Optimizer = _construct("optimizer", found, wanted, (list(parameters),))
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
    module = torch.optim.lr_scheduler
    classes = {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, module.LRScheduler)}
    found = _find("schedule", schedule.name, {n: c for n, c in classes.items() if n[0] != "_" and n != "LRScheduler"})
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
    return Schedule(_construct("schedule", found, Spec(schedule.name, options), (optimizer,)), every)


def _shape_and_classes(task: Task, train: Source) -> tuple[tuple[int, ...], int]:
    if isinstance(task.data, LocatedData) and task.data.info.classes is not None:
        return task.data.info.input_shape, task.data.info.classes
    batch = train.fetch([0])
    if task.reconstructs:
        inputs: torch.Tensor = batch[0] if isinstance(batch, (tuple, list)) else batch
        return tuple(inputs.shape[1:]), 1  # there are no classes
    if not isinstance(batch, (tuple, list)) or not isinstance(batch[0], torch.Tensor):
        raise ConfigError(
            f"The model {task.model} can be fitted to data whose samples are (input, target) pairs of tensors."
        )
    if not isinstance(train, ArraySource) or len(train.tensors) < 2:
        raise ConfigError(
            f"The number of classes for {task.model} cannot be seen from this data. Give the model itself instead of "
            "its name, for example model=syncline.zoo.build('lenet', (1, 28, 28), classes=10)."
        )
    return tuple(batch[0].shape[1:]), int(train.tensors[1].max()) + 1


def _functional_losses() -> dict[str, Callable[..., torch.Tensor]]:
    without_suffix = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
    functions = vars(torch.nn.functional)
    return {
        n: f
        for n, f in functions.items()
        if callable(f) and (n in without_suffix or n.endswith("_loss")) and n[0] != "_"
    }


def _find(kind: str, name: str, classes: Mapping[str, Any]) -> Any:
    by_key = {_key(n, ""): c for n, c in classes.items()}
    found = by_key.get(_key(name, ""))
    if found is None:
        raise UnknownName.among(kind, name, classes)
    return found


def _key(name: str, suffix: str) -> str:
    """`CrossEntropyLoss`, `cross_entropy` and `cross-entropy` are one name."""
    return (
        re.sub(f"{suffix}$", "", name.lower().replace("_", "").replace("-", ""))
        if suffix
        else name.lower().replace("_", "")
    )


def _check_options(function: Callable[..., Any], spec: Spec, skip: tuple[str, ...] = ()) -> None:
    known = [n for n in inspect.signature(function).parameters if n not in (*skip, "self", "params", "optimizer")]
    for option in spec.options:
        if option not in known:
            close = nearest(option, known)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{spec.name} has no option {option!r}.{hint} It takes: {', '.join(known)}.")


def _construct(kind: str, found: Callable[..., Any], spec: Spec, arguments: tuple[Any, ...]) -> Any:
    _check_options(found, spec)
    try:
        return found(*arguments, **spec.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The {kind} {spec} cannot be made: {error}.") from error
