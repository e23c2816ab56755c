"""`Declared`: a model as a list of layers, as plain data.

Here: the types, and reading them from lists and tables of Python. No torch: a driver checks and sends them, a worker
builds them (`build.py`). Not here: files (`read.py`).

    syncline.declared(["conv2d(8, 3)", "relu", "flatten", "linear('classes')"])
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.declare.call import Call, frozen
from syncline.errors import ConfigError, ConfigFileError, nearest

if TYPE_CHECKING:
    from torch import nn

__all__ = ["INPUT", "PREVIOUS", "Declared", "Layer", "Place", "Weights", "declared", "is_declaration", "of_table"]

_OF_MODEL = ("name", "input", "init", "bias_init", "regularizer", "constraint", "layers")
_OF_LAYER = ("layer", "name", "from", "init", "bias_init", "regularizer", "constraint")
PREVIOUS, INPUT = "previous", "input"
"""What `from` may name besides layers: the layer before, and the sample."""


@dataclass(frozen=True)
class Place:
    """Where something is written, so that a mistake can be shown there."""

    path: Path | None = None
    line: int | None = None
    keys: Mapping[str, int] = field(default_factory=dict)
    """The lines of single settings."""

    def error(self, message: str, key: str | None = None) -> ConfigError:
        """The mistake, with file and line if they are known."""
        if self.path is None:
            return ConfigError(message)
        return ConfigFileError.at(self.path, self.keys.get(key or "", self.line), message)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How weights begin, and what keeps them in bounds."""

    init: Call | None = None
    bias_init: Call | None = None
    regularizer: tuple[Call, ...] = ()
    constraint: tuple[Call, ...] = ()

    def __str__(self) -> str:
        parts = [f"init={self.init}" * bool(self.init), f"bias_init={self.bias_init}" * bool(self.bias_init)]
        parts += [f"regularizer={r}" for r in self.regularizer] + [f"constraint={c}" for c in self.constraint]
        return " ".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: what it is, what it is called, and whose outputs it takes."""

    call: Call
    number: int
    """From 1, as people count."""
    name: str | None = None
    sources: tuple[str, ...] = (PREVIOUS,)
    weights: Weights = Weights()
    place: Place = field(default=Place(), compare=False)

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        source = f" from {', '.join(self.sources)}" if self.sources != (PREVIOUS,) else ""
        weights = f" {self.weights}" if str(self.weights) else ""
        return f"{name}{self.call}{source}{weights}"

    @property
    def label(self) -> str:
        """How it is told of: `layer 3 'Linear'`."""
        return f"layer {self.number} {self.name or self.call.name!r}"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A model as a list of layers. Its text is the same for the same model, wherever it was written."""

    layers: tuple[Layer, ...]
    name: str = "network"
    input: tuple[int, ...] | None = None
    """The shape of a sample, if it was written; the data has to agree."""
    weights: Weights = Weights()
    """For layers that say nothing else."""
    place: Place = field(default=Place(), compare=False)

    @classmethod
    def from_toml(cls, path: str | Path) -> Declared:
        """The model of a run file."""
        from syncline.declare.read import read_model

        return read_model(Path(path))

    def build(
        self, input_shape: Sequence[int] | None = None, classes: int | None = None, vocabulary: int | None = None
    ) -> nn.Module:
        """The module, for samples of `input_shape` (without the batch dimension).

        The parameters are drawn from torch's global generator, layer by layer, as torch's own layers do.
        """
        shape = input_shape if input_shape is not None else self.input
        if shape is None:
            raise ConfigError("Which shape has a sample? Give input_shape, for example (1, 28, 28).")
        # Only those who build a model need torch.
        sizes = importlib.import_module("syncline.declare.sizes").Sizes(
            input_shape=tuple(shape), classes=classes, vocabulary=vocabulary
        )
        made: nn.Module = importlib.import_module("syncline.declare.build").build(self, sizes)
        return made

    def __str__(self) -> str:
        weights = f" {self.weights}" if str(self.weights) else ""
        return f"{self.name}[{'; '.join(map(str, self.layers))}]{weights}"


def declared(layers: Iterable[str | Mapping[str, Any]], **settings: Any) -> Declared:
    """A model as a list of layers: texts such as 'conv2d(20, 5)', or tables such as {"layer": "relu", "name": "a"}.

    Settings are those of the table [model] in a run file: name, input, init, bias_init, regularizer, constraint.

    >>> print(declared(["linear(8)", "relu", {"layer": "add", "from": ["input", "previous"]}]))
    network[linear(8); relu; add from input, previous]
    """
    return of_table({"layers": list(layers), **settings}, Place(), {})


def is_declaration(model: object) -> bool:
    """Whether this is a table with a list of layers. Models by name, too, may have an option `layers`: a number."""
    return isinstance(model, Mapping) and "layers" in model and not isinstance(model["layers"], int)


def of_table(table: Mapping[str, Any], place: Place, places: Mapping[int, Place]) -> Declared:
    """From the table [model] of a run file; `places` says where each layer is written, counted from 0."""
    for key in table:
        if key not in _OF_MODEL:
            raise place.error(f"A model has no setting {key!r}. {_meant(key, _OF_MODEL)}", key)
    layers = table.get("layers")
    if not isinstance(layers, list) or not layers:
        raise place.error('layers is empty. Give at least one: layers = ["flatten", "linear(10)"].', "layers")
    shape = table.get("input")
    if shape is not None and not _is_shape(shape):
        raise place.error(f"input is {shape!r}, but must be the shape of a sample, such as [1, 28, 28].", "input")
    name = table.get("name", "network")
    if not isinstance(name, str) or not name:
        raise place.error(f"name is {name!r}, but must be a text.", "name")
    made: list[Layer] = []
    for k, written in enumerate(layers):
        made.append(_layer(written, k + 1, places.get(k, Place(place.path, place.line)), made))
    return Declared(
        layers=tuple(made),
        name=name,
        input=tuple(shape) if shape is not None else None,
        weights=_weights(table, place),
        place=place,
    )


def _layer(written: object, number: int, place: Place, before: Sequence[Layer]) -> Layer:
    table = {"layer": written} if isinstance(written, str) else written
    if not isinstance(table, Mapping) or not isinstance(table.get("layer"), str):
        raise place.error(f'Layer {number} does not say which layer it is, for example layer = "Linear".')
    try:
        call = Call.parse(table["layer"])
    except ConfigError as error:
        raise place.error(str(error), "layer") from error
    # One layer, PReLU, has an option of its own that is called init; it is a number.
    own = {k for k in _OF_LAYER if not (k == "init" and isinstance(table.get(k), (int, float)))}
    options = {k: frozen(v) for k, v in table.items() if k not in own}
    twice = sorted(set(options) & set(call.options))
    if twice:
        raise place.error(f"{twice[0]} is given twice for layer {number} {call.name!r}.", twice[0])
    name = table.get("name")
    taken = [layer.name for layer in before if layer.name]
    if name is not None:
        _check_name(name, taken, place)
    return Layer(
        call=call.with_options(**options),
        number=number,
        name=name,
        sources=_sources(table.get("from", PREVIOUS), taken, place),
        weights=_weights({k: v for k, v in table.items() if k in own}, place),
        place=place,
    )


def _check_name(name: object, taken: Sequence[str], place: Place) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise place.error(f"name is {name!r}, but must be a word of letters, digits and _, such as 'first'.", "name")
    if name in (PREVIOUS, INPUT):
        raise place.error(f"name is {name!r}, which has a meaning of its own. Choose another one.", "name")
    if name in taken:
        raise place.error(f"name is {name!r}, but another layer has this name. Choose another one.", "name")


def _sources(written: object, names: Sequence[str], place: Place) -> tuple[str, ...]:
    sources = [written] if isinstance(written, str) else written
    if not isinstance(sources, (list, tuple)) or not sources or not all(isinstance(s, str) for s in sources):
        raise place.error(f"from is {written!r}, but must be the name of a layer, or a list of names.", "from")
    for source in sources:
        if source not in (PREVIOUS, INPUT, *names):
            known = [*names, PREVIOUS, INPUT]
            raise place.error(
                f"from names {source!r}, but no layer before this one is called that. {_meant(source, known)}", "from"
            )
    return tuple(sources)


def _weights(table: Mapping[str, Any], place: Place) -> Weights:
    found: dict[str, Any] = {}
    for key in ("init", "bias_init", "regularizer", "constraint"):
        if key not in table:
            continue
        several = key in ("regularizer", "constraint")
        values = table[key] if several and isinstance(table[key], list) else [table[key]]
        try:
            calls = tuple(Call.of(value, what=key) for value in values)
        except ConfigError as error:
            raise place.error(str(error), key) from error
        found[key] = calls if several else calls[0]
    return Weights(**found)


def _is_shape(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value
    )


def _meant(name: str, known: Sequence[str]) -> str:
    close = nearest(name, known, count=1)
    return f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(known)}."
