"""`Task`: what to train. Model, data, loss, optimizer, schedule and metrics.

Here: the type. It checks names and options on construction without importing torch, so that a typo fails at once. Not
here: building torch objects from names (`workers/build.py`), and how to run the task (`config/run.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from syncline.config.spec import Spec
from syncline.data import transforms
from syncline.data.files.options import FileOptions
from syncline.data.files.store import is_location
from syncline.data.length import length_of
from syncline.data.named import DataInfo, Progress, named, names
from syncline.errors import ConfigError, UnknownName
from syncline.models.declared.declaration import Declared, TomlLocation, is_declaration, of_table
from syncline.models.zoo import registry as zoo
from syncline.planning.planner import TaskFacts

if TYPE_CHECKING:
    import torch

    from syncline.data.files.manifest import Manifest
    from syncline.graphs.node_data import NodeData
    from syncline.models.zoo.model_card import ModelCard

__all__ = ["LocatedData", "Script", "Task", "adam", "adamw", "made", "optimizer", "sgd"]

_DEFAULT_LOSS = "cross_entropy"
_SAMPLED_ROWS, _SAMPLED_VALUES = 16, 100_000
"""How much of the data its fingerprint takes into account."""


def sgd(lr: float, **options: Any) -> Spec:
    """Stochastic gradient descent; options as for `torch.optim.SGD`, such as momentum and nesterov."""
    return Spec("SGD", {"lr": lr, **options})


def adam(lr: float = 1e-3, **options: Any) -> Spec:
    """Adam; options as for `torch.optim.Adam`."""
    return Spec("Adam", {"lr": lr, **options})


def adamw(lr: float = 1e-3, **options: Any) -> Spec:
    """AdamW; options as for `torch.optim.AdamW`."""
    return Spec("AdamW", {"lr": lr, **options})


def optimizer(name: str, **options: Any) -> Spec:
    """Any optimizer by name: those of `torch.optim`, Lion, LAMB, LARS, Yogi and AdaBelief."""
    return Spec(name, options)


@dataclass(frozen=True)
class Script:
    """A user's own training loop: the script and its arguments."""

    path: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocatedData:
    """Data that was found: a dataset by name, or files with their manifest."""

    name: str
    path: str
    info: DataInfo
    options: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None

    @property
    def label(self) -> str:
        """For people: the name with its options, or the last part of the path."""
        return str(Spec(self.name, self.options)) if self.manifest is None else self.name

    @property
    def identity(self) -> str:
        """Distinguishes it from all other data, for the fingerprint of a run."""
        return self.label if self.manifest is None else str(Spec(self.path, self.options))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train. Everything can be a name, a Python object, or a function that returns the object.

    >>> task = Task(model="lenet", data="mnist", optimizer=sgd(lr=0.05, momentum=0.9), metrics=["accuracy"])
    >>> task.model, task.optimizer
    (Spec(name='lenet', options={}), Spec(name='SGD', options={'lr': 0.05, 'momentum': 0.9}))

    Attributes:
        model: An `nn.Module`, a function that returns one, a name such as 'lenet' or 'timm:resnet50', or a list of
            layers (`syncline.declared`).
        data: A map-style Dataset, a tensor, an array, a tuple (inputs, targets), a function that returns one of these,
            a name such as 'mnist', or a path or URL.
        test: Test data, of the same types. Named datasets bring their own.
        loss: A name from `torch.nn`, or a callable of output and target that returns the mean over the samples.
        optimizer: A name from `torch.optim` with options, or a function of the parameters that returns one.
        schedule: A name from `torch.optim.lr_scheduler`, or a function of the optimizer that returns one.
        metrics: Names from torchmetrics, or metric objects.
        weight_decay: Overrides the optimizer's weight decay.
        clip_norm: Clips the norm of the global gradient.
        augment: Transforms of training inputs, by name or as callables, such as "crop(padding=4), flip".

    What is not set comes from the model's card, if the model has a name, else from plain defaults.
    """

    model: Spec | Declared | torch.nn.Module | Callable[[], torch.nn.Module] | str | Mapping[str, Any]
    data: Any
    test: Any = None
    loss: Spec | str | Callable[..., torch.Tensor] | None = None
    optimizer: Spec | str | Mapping[str, Any] | Callable[..., torch.optim.Optimizer] | None = None
    schedule: Spec | str | Mapping[str, Any] | Callable[..., Any] | None = None
    metrics: Iterable[Spec | str | Any] | str | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    augment: Iterable[Any] | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, Mapping) and is_declaration(self.model):
            object.__setattr__(self, "model", of_table(self.model, TomlLocation(), {}))
        if self.test is None and (own := getattr(self.data, "test_source", None)) is not None:
            object.__setattr__(self, "test", own)
        for name in ("model", "loss", "optimizer", "schedule"):
            value = getattr(self, name)
            if isinstance(value, (str, Mapping)):
                object.__setattr__(self, name, Spec.of(value, what=name))
        object.__setattr__(self, "data", _with_nodes(self.data))
        if isinstance(self.data, (str, os.PathLike, Mapping)):
            object.__setattr__(self, "data", _data_spec(self.data))
        if isinstance(self.metrics, str):
            object.__setattr__(self, "metrics", [m.strip() for m in self.metrics.split(",")])
        if self.metrics is not None:
            specs = tuple(Spec.parse(m) if isinstance(m, str) else m for m in self.metrics)
            object.__setattr__(self, "metrics", specs)
        object.__setattr__(self, "augment", transforms.parse(self.augment))
        for name in ("weight_decay", "clip_norm"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value:g}, but must be 0 or more.")
        self._check_names()

    def with_defaults(self) -> Task:
        """The task with defaults for what the user left out: from the model's card, else plain ones."""
        card = zoo.card(self.model.name) if isinstance(self.model, Spec) else None
        defaults: dict[str, Any] = {
            "loss": Spec(card.loss if card else _DEFAULT_LOSS),
            "optimizer": Spec.of(card.optimizer, what="optimizer") if card else sgd(lr=0.05, momentum=0.9),
            "metrics": tuple(Spec(m) for m in card.metrics) if card else (),
        }
        if self.optimizer is None and card and card.schedule:
            defaults["schedule"] = Spec.of(card.schedule, what="schedule")
        if (not card and self.loss is None) or _is_classification(self.loss):
            defaults["metrics"] = (Spec("accuracy"),)
        return dataclasses.replace(self, **{k: v for k, v in defaults.items() if getattr(self, k) is None})

    @property
    def reconstructs(self) -> bool:
        """Whether the target is the input, as for an autoencoder."""
        return isinstance(self.model, Spec) and zoo.card(self.model.name).target == "input"

    @property
    def takes_graph(self) -> bool:
        """Whether the model is a graph network by name."""
        return isinstance(self.model, Spec) and zoo.card(self.model.name).takes == "graph"

    def located(self, data_dir: Path | None, progress: Progress | None) -> Task:
        """The task with its data found on this machine, downloaded, or scanned if it is in files."""
        found = self._located(data_dir, progress)
        if not isinstance(found.data, LocatedData):
            return found
        shape = found.data.info.input_shape
        for transform in self.augment or ():
            if isinstance(transform, transforms.Transform):
                shape = transform.shape(shape)
        info = dataclasses.replace(found.data.info, input_shape=shape)
        return dataclasses.replace(found, data=dataclasses.replace(found.data, info=info))

    def _located(self, data_dir: Path | None, progress: Progress | None) -> Task:
        if not isinstance(self.data, Spec):
            return self
        if self.takes_graph:
            from syncline.graphs.node_data import located_node_data

            return dataclasses.replace(self, data=located_node_data(self.data.name, dict(self.data.options)))
        if self.data.name not in names():
            return self._located_in_files(self.data)
        source = named(self.data.name, **self.data.options)
        path = source.locate(data_dir, progress)
        located = LocatedData(name=source.name, path=str(path), info=source.info(path), options=self.data.options)
        return dataclasses.replace(self, data=located)

    def _located_in_files(self, data: Spec) -> Task:
        from syncline.data.files.find import scan

        test = {"test": os.fspath(self.test)} if isinstance(self.test, (str, os.PathLike)) else {}
        options = {**data.options, **test}
        found = scan(data.name, FileOptions.of(options))
        name = found.location.rstrip("/").rpartition("/")[2]
        located = LocatedData(name=name, path=found.location, info=found.info(name), options=options, manifest=found)
        return dataclasses.replace(self, data=located, test=None if test else self.test)

    def facts(self, kind: Literal["train", "own-loop"] = "train") -> TaskFacts:
        """The facts that the planner needs."""
        card = zoo.card(self.model.name) if isinstance(self.model, Spec) else None
        if isinstance(self.data, LocatedData):
            train, test = self.data.info.train_samples, self.data.info.test_samples
        else:
            train, test = _length(made(self.data)), 0
        graph = self._graph_kind(card)
        if (nodes := _node_data(self.data)) is not None:
            test = len(nodes.test)
        if self.test is not None:
            test = _length(made(self.test))
        label_of_model = str(self.model) if isinstance(self.model, Spec) else _label(self.model)
        identity_of_model = str(self.model) if isinstance(self.model, Declared) else label_of_model
        label_of_data = self.data.label if isinstance(self.data, LocatedData) else _label(self.data)
        identity_of_data = self.data.identity if isinstance(self.data, LocatedData) else label_of_data
        identity = f"{identity_of_model}|{identity_of_data}|{train}|{self.loss}|{self.optimizer}|{self.schedule}"
        if self.augment:
            identity += f"|{self.augment}"
        return TaskFacts(
            kind=kind,
            model=label_of_model,
            data=label_of_data,
            fingerprint=_digest(identity),
            data_fingerprint=_digest(f"{identity_of_data}|{train}|{_sampled_content(self.data)}"),
            graph=graph,
            train_samples=train,
            test_samples=test,
            clip_norm=self.clip_norm,
            recommended_epochs=card.epochs if card else None,
            recommended_batch=train if graph == "parts" else card.batch if card else None,
            learns_by_sums=card is not None and card.learns_by == "sums",
        )

    def _graph_kind(self, card: ModelCard | None) -> Literal["", "parts", "samples"]:
        """Whether the model computes a graph in parts, or draws neighbors; "" for any other model."""
        if card is None or card.takes != "graph" or not isinstance(self.model, Spec):
            return ""
        return "samples" if {**card.options, **self.model.options}.get("neighbors") else "parts"

    def _check_graph(self) -> None:
        """Refuse a graph network without a graph, and a graph for another model."""
        if _node_data(self.data) is not None and not self.takes_graph:
            raise ConfigError(
                f"The data is a graph, but the model {_label(self.model)} is no graph network by name. Use "
                f"{', '.join(zoo.graph_names())}.",
                code="needs-graph-network", model=_label(self.model),
            )  # fmt: skip
        if self.takes_graph and _node_data(self.data) is None and not isinstance(self.data, Spec):
            raise ConfigError(
                f"The model {self.model} needs a graph, but the data is {_label(self.data)}. Pass a syncline.Graph, "
                "syncline.graph.node_data(...), the name cora or debian, or nodes and edges in files: "
                "graph:nodes.csv,edges.csv.",
                code="needs-graph", model=str(self.model),
            )  # fmt: skip

    def _check_learning(self, card: ModelCard) -> None:
        """Refuse what is about gradients for a model that learns without them."""
        if card.learns_by == "gradients":
            return
        own = {"loss": Spec(card.loss), "optimizer": Spec.of(card.optimizer, what="optimizer")}
        for name in ("optimizer", "loss", "schedule", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if value is not None and value != own.get(name):
                raise ConfigError(
                    f"{name} is {value}, but the model {card.name!r} learns by counting and averaging what its nodes "
                    f"see, not by gradients, so there is nothing that it could change. Leave {name} out.",
                    code="learns-by-sums",
                    setting=name,
                    model=card.name,
                )

    def _check_names(self) -> None:
        if isinstance(self.model, Spec):
            zoo.check_model_options(zoo.card(self.model.name), self.model.options)
            self._check_learning(zoo.card(self.model.name))
        self._check_graph()
        if isinstance(self.data, Spec) and not self.takes_graph:
            _check_data(self.data)


def _data_spec(data: str | os.PathLike[str] | Mapping[str, Any]) -> Spec:
    """Existing paths are taken literally, since they may contain any character; the rest is a name with options."""
    if isinstance(data, os.PathLike) or (isinstance(data, str) and os.path.exists(data)):
        return Spec(os.fspath(data))
    return Spec.of(data, what="data")


def _check_data(data: Spec) -> None:
    if data.name in names():
        named(data.name, **data.options)
    elif is_location(data.name):
        FileOptions.of(data.options)
    else:
        is_graph = data.name in ("cora", "debian") or data.name.startswith("graph:")
        graphs = f" Graphs are for graph networks: {', '.join(zoo.graph_names())}." if is_graph else ""
        raise UnknownName.among("dataset", data.name, names(), more=f"For your own files, pass a path or URL.{graphs}")


def made(data: Any) -> Any:
    """The data itself, if the user passed a function that returns it."""
    is_function = callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "fetch")
    return data() if is_function else data


def _with_nodes(data: Any) -> Any:
    """A graph as the data of a graph network; other data as it is."""
    if isinstance(data, (str, os.PathLike, Mapping, Spec, LocatedData, tuple, list)):
        return data
    from syncline.graphs.foreign import is_graph  # imports NumPy, which a run of names does not need here
    from syncline.graphs.node_data import node_data

    return node_data(data) if is_graph(data) else data


def _node_data(data: Any) -> NodeData | None:
    """The data, if it is a graph."""
    return data if type(data).__name__ == "NodeData" and hasattr(data, "edges") else None


def _is_classification(loss: object) -> bool:
    return isinstance(loss, Spec) and loss.name.lower().replace("_", "") in ("crossentropy", "crossentropyloss")


def _length(data: Any) -> int:
    if isinstance(data, (tuple, list)) and data and hasattr(data[0], "__len__") and not isinstance(data[0], str):
        return length_of(data[0])
    if not hasattr(data, "__len__"):
        raise ConfigError(
            f"The data is a {type(data).__name__}, which has no length. Pass a map-style Dataset (with __getitem__ and "
            "__len__), a tensor, an array, or a tuple (inputs, targets) of these."
        )
    return length_of(data)


def _label(thing: Any) -> str:
    if isinstance(thing, (tuple, list)):
        return "arrays"
    if isinstance(thing, Declared):
        return thing.name
    return getattr(thing, "__name__", type(thing).__name__).strip("<>")


def _digest(identity: str) -> str:
    return hashlib.sha256(_without_addresses(identity).encode()).hexdigest()[:16]


def _sampled_content(data: Any) -> str:
    """A digest of some samples of arrays and tensors; empty for everything else, whose samples may be random."""
    if (nodes := _node_data(data)) is not None:
        return nodes.fingerprint
    digest = hashlib.sha256()
    for part in data if isinstance(data, (tuple, list)) else (data,):
        if not (hasattr(part, "shape") and hasattr(part, "dtype")) or not part.shape:
            return ""
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        try:
            rows = part[:: max(1, len(part) // _SAMPLED_ROWS)]
            values = rows.tolist() if math.prod(rows.shape) <= _SAMPLED_VALUES else rows[0].tolist()
        except (TypeError, ValueError, AttributeError, RuntimeError):
            continue  # sparse tensors, for instance, have no slices
        digest.update(repr(values).encode())
    return digest.hexdigest()[:16]


def _without_addresses(text: str) -> str:
    """Drop memory addresses, as in `<function f at 0x7f...>`: the same task must have the same fingerprint."""
    return " ".join(word for word in text.replace(">", " ").split() if not word.startswith("0x"))
