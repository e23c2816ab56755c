"""From the names in a task to torch objects.

Here: building the models, losses, optimizers and schedules that a task names. Not here: the available names
(`models/catalog/`), metrics (`metrics.py`), datasets by name (`data/named.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from syncline.config.spec import Spec
from syncline.data import transforms
from syncline.data.augmented import AugmentedSource, untransformed
from syncline.data.files.source import sources as file_sources
from syncline.data.named import DataInfo, named
from syncline.data.source import ArraySource, Source, as_source, inputs_only
from syncline.errors import ConfigError, UnknownName
from syncline.graphs.node_data import NodeData
from syncline.models.catalog import losses, optimizers, schedules
from syncline.models.catalog.lookup import check_accepts, construct, find, key
from syncline.models.declared.build import build as build_declared
from syncline.models.declared.declaration import Declared
from syncline.models.declared.sizes import Sizes
from syncline.models.graph_networks.network import GraphNetwork
from syncline.models.zoo import registry as zoo
from syncline.task import LocatedData, Task, made

Loss = Callable[..., torch.Tensor]


@runtime_checkable
class BringsOptimizer(Protocol):
    """A model that does not learn by gradients, and what applies that which it has in their place."""

    def own_optimizer(self) -> torch.optim.Optimizer: ...

    def begin_step(self, samples: int) -> None:
        """A step with so many samples over all workers begins."""


def build_sources(task: Task, seed: int = 0) -> tuple[Source, Source | None]:
    """The training data and the test data, if any; without targets if the model reconstructs its input.

    `seed` determines the randomness of augmentation.
    """
    train, test = _sources(task)
    if task.reconstructs:
        train, test = inputs_only(train), inputs_only(test) if test is not None else None
    if augment := transforms.parse(task.augment):
        train = AugmentedSource(train, augment, seed=seed, is_training=True)
        test = AugmentedSource(test, augment, seed=seed, is_training=False) if test is not None else None
    return train, test


def _sources(task: Task) -> tuple[Source, Source | None]:
    if isinstance(task.data, NodeData):
        nodes = task.data
        return NodeSource(nodes, nodes.train), NodeSource(nodes, nodes.test)
    if isinstance(task.data, LocatedData) and task.data.manifest is not None:
        in_files, own_test = file_sources(task.data.manifest), task.test
        return in_files[0], as_source(made(own_test)) if own_test is not None else in_files[1]
    if isinstance(task.data, LocatedData):
        data_set = named(task.data.name, **task.data.options)
        path, scale = Path(task.data.path), task.data.info.scale
        train: Source = ArraySource(*data_set.load(path, "train"), scale=scale)
        own_test = as_source(made(task.test)) if task.test is not None else None
        return train, own_test or ArraySource(*data_set.load(path, "test"), scale=scale)
    test = as_source(made(task.test)) if task.test is not None else None
    return as_source(made(task.data)), test


class NodeSource(ArraySource):
    """Some nodes of a graph, by number, and their classes."""

    def __init__(self, data: NodeData, nodes: np.ndarray) -> None:
        super().__init__(torch.from_numpy(nodes), torch.from_numpy(data.labels[nodes]))
        self.data = data


def class_names(task: Task) -> list[str] | None:
    """The names of the classes, if the data has any."""
    if isinstance(task.data, NodeData):
        return list(task.data.class_names) if task.data.class_names else None
    names = task.data.info.class_names if isinstance(task.data, LocatedData) else None
    return list(names) if names else None


def build_model(task: Task, train: Source, seed: int) -> nn.Module:
    """The model, with weights drawn from `seed` if Syncline builds it."""
    torch.manual_seed(seed)
    if isinstance(task.model, Spec):
        input_shape, classes, vocabulary = _fit(task, train)
        network = zoo.build(task.model.name, input_shape, classes, vocabulary, **dict(task.model.options))
        if isinstance(network, GraphNetwork) and isinstance(train, NodeSource):
            network.bind(train.data)
        return network
    if isinstance(task.model, Declared):
        return build_declared(task.model, _sizes(task, train))
    model = task.model if isinstance(task.model, nn.Module) else task.model()  # type: ignore[operator]  # a Spec by now
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"The model is a {type(model).__name__}. Pass an nn.Module, a function that returns one, or a name."
        )
    return model


def parameter_shapes(task: Task) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters by name; they take no memory if Syncline builds the model."""
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
        check_accepts(functions[loss.name], loss, skip=("input", "target"))
        return functools.partial(functions[loss.name], **loss.options)
    by_key = {key(name).removesuffix("loss"): c for name, c in classes.items()}
    found = by_key.get(key(loss.name).removesuffix("loss"))
    if found is None:
        raise UnknownName.among("loss", loss.name, [*functions, *classes])
    made: Loss = construct("loss", found, loss, ())
    return made


def build_optimizer(task: Task, model: nn.Module, *, may_fuse: bool = True) -> torch.optim.Optimizer:
    """An optimizer of the model by its name in torch.optim, or from the user's function of the parameters.

    `may_fuse`: torch may update all parameters in one operation, where it can.
    """
    if isinstance(model, BringsOptimizer):
        return model.own_optimizer()
    wanted, parameters = task.optimizer, model.parameters()
    if not isinstance(wanted, Spec):
        if task.weight_decay is not None:
            raise ConfigError(
                "weight_decay is set, but the optimizer is a function. Set weight_decay inside that function."
            )
        made = wanted(parameters) if callable(wanted) else wanted
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"The optimizer's function returned a {type(made).__name__}, not a torch optimizer.")
        return made
    found = find("optimizer", wanted.name, optimizers.table())
    if task.weight_decay is not None:
        wanted = wanted.with_options(weight_decay=task.weight_decay)
    if may_fuse and _can_be_fused(found, wanted, model):
        wanted = wanted.with_options(fused=True)
    optimizer: torch.optim.Optimizer = construct("optimizer", found, wanted, (list(parameters),))
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"] and optimizer.defaults["momentum"]:
        # The fused step fails if some parameters have momentum and others, not used until now, have none.
        optimizer.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in model.parameters()})
    return optimizer


def _can_be_fused(optimizer: type, wanted: Spec, model: nn.Module) -> bool:
    """Whether one fused operation can update all parameters, and the user has not set anything against it."""
    if "fused" not in inspect.signature(optimizer).parameters:
        return False
    if {"fused", "foreach", "capturable", "differentiable"} & set(wanted.options) or wanted.options.get("dampening"):
        return False
    has_sparse_gradients = any(getattr(module, "sparse", False) for module in model.modules())
    return not has_sparse_gradients and all(
        p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters()
    )


_BY_EPOCH = {"StepLR", "MultiStepLR", "ExponentialLR", "MultiplicativeLR", "LambdaLR", "ReduceLROnPlateau"}
"""Schedules that count epochs, as in torch's examples; all others advance with every step."""


class Schedule:
    """A learning-rate schedule and when to advance it."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler, every: str) -> None:
        self.scheduler = scheduler
        # torch warns if the optimizer's `step` was never called; with parameter servers, workers never call it.
        vars(scheduler.optimizer)["_opt_called"] = True
        self._every = every

    def after_step(self, steps: int) -> None:
        """Advance after step `steps`, but never beyond it: a run that repeats a step has advanced before."""
        if self._every == "step" and self.scheduler.last_epoch < steps:
            self.scheduler.step()

    def after_epoch(self, loss: float) -> None:
        """Advance after an epoch; `loss` is the latest training loss."""
        if self._every == "epoch":
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss)
            else:
                self.scheduler.step()


def build_schedule(
    schedule: Spec | Callable[..., Any] | None, optimizer: torch.optim.Optimizer, *, total_steps: int, epochs: int
) -> Schedule | None:
    """A schedule by its name in torch.optim.lr_scheduler; missing lengths default to the run's."""
    if schedule is None:
        return None
    if not isinstance(schedule, Spec):
        made = schedule(optimizer)
        every = "epoch" if type(made).__name__ in _BY_EPOCH else "step"
        return Schedule(made, every)
    found = find("schedule", schedule.name, schedules.table())
    every = schedule.options.get("every", "epoch" if found.__name__ in _BY_EPOCH else "step")
    if every not in ("step", "epoch"):
        raise ConfigError(f"The schedule's option 'every' is {every!r}, but must be 'step' or 'epoch'.")
    length = total_steps if every == "step" else epochs
    options = {k: v for k, v in schedule.options.items() if k != "every"}
    takes = inspect.signature(found).parameters
    if "T_max" in takes:
        options.setdefault("T_max", length)
    if found.__name__ == "OneCycleLR":
        options.setdefault("total_steps", length + 1)  # torch also counts the learning rate before the first step
        options.setdefault("max_lr", optimizer.param_groups[0]["lr"])
    elif "total_iters" in takes and found.__name__ == "PolynomialLR":
        options.setdefault("total_iters", length)
    return Schedule(construct("schedule", found, Spec(schedule.name, options), (optimizer,)), every)


def _fit(task: Task, train: Source) -> tuple[tuple[int, ...], int, int | None]:
    """The shape of an input, the number of classes and, if the inputs are tokens, the vocabulary size."""
    if isinstance(task.data, LocatedData):
        info = task.data.info
        return info.input_shape, info.classes or 1, info.vocabulary  # without classes this is a regression
    if isinstance(train, NodeSource):
        return (train.data.features.shape[1],), train.data.classes, None
    batch = train.fetch([0])
    if task.reconstructs:
        inputs: torch.Tensor = batch[0] if isinstance(batch, (tuple, list)) else batch
        return tuple(inputs.shape[1:]), 1, None  # reconstruction has no classes
    if not isinstance(batch, (tuple, list)) or not isinstance(batch[0], torch.Tensor):
        raise ConfigError(f"The model {task.model} needs data whose samples are (input, target) pairs of tensors.")
    base = untransformed(train)
    if not isinstance(base, ArraySource) or len(base.tensors) < 2:
        raise ConfigError(
            f"The number of classes for {task.model} cannot be inferred from this data. Pass the model itself instead "
            "of its name, for example model=syncline.models.zoo.build('lenet', (1, 28, 28), classes=10)."
        )
    inputs, targets = base.tensors[:2]
    classes = int(targets.max()) + 1
    if inputs.is_floating_point() or base.scale is not None or inputs.shape != targets.shape:
        return tuple(batch[0].shape[1:]), classes, None
    vocabulary = max(int(inputs.max()) + 1, classes)  # each token's target is the next token
    return tuple(inputs.shape[1:]), vocabulary, vocabulary


def _sizes(task: Task, train: Source) -> Sizes:
    """The sizes that a declared model needs to know of its data."""
    if isinstance(task.data, LocatedData):
        return _sizes_of(task.data.info)
    batch = train.fetch([0])
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(inputs, torch.Tensor):
        raise ConfigError(f"A declared model needs samples that begin with a tensor, not {type(inputs).__name__}.")
    base = untransformed(train)
    arrays = base.tensors if isinstance(base, ArraySource) else ()
    are_tokens = not inputs.is_floating_point()
    tokens = _class_count(arrays[0]) if arrays and are_tokens else None
    classes = _class_count(arrays[1]) if len(arrays) > 1 and not arrays[1].is_floating_point() else None
    if tokens and classes and arrays[0].shape == arrays[1].shape:  # each token's target is the next token
        tokens = classes = max(tokens, classes)
    return Sizes(input_shape=tuple(inputs.shape[1:]), classes=classes, vocabulary=tokens, are_tokens=are_tokens)


def _class_count(numbers: torch.Tensor) -> int:
    """The number of classes, if they are numbered from 0."""
    return int(numbers.max()) + 1


def _sizes_of(info: DataInfo) -> Sizes:
    return Sizes(input_shape=info.input_shape, classes=info.classes, vocabulary=info.vocabulary)
