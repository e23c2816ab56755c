"""`Declared`: a model as a list of layers, as plain data.

Here: the types, and creating them from Python lists and tables. No torch: the driver checks and sends them, workers
build them (`build.py`). Not here: files (`read.py`).

    syncline.declared(["conv2d(8, 3)", "relu", "flatten", "linear('classes')"])
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import ConfigError, ConfigFileError, UnknownName
from syncline.models.declared.call import Call, frozen

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "INPUT",
    "PREVIOUS",
    "Declared",
    "Layer",
    "TomlLocation",
    "WeightSettings",
    "declared",
    "is_declaration",
    "of_table",
]

_OF_MODEL = ("name", "input", "init", "bias_init", "regularizer", "constraint", "layers")
_OF_LAYER = ("layer", "name", "from", "init", "bias_init", "regularizer", "constraint")
PREVIOUS, INPUT = "previous", "input"
"""What `from` can name besides layers: the previous layer, and the sample."""


@dataclass(frozen=True)
class TomlLocation:
    """The location of a setting in a TOML file, for error messages."""

    path: Path | None = None
    line: int | None = None
    keys: Mapping[str, int] = field(default_factory=dict)
    """The lines of individual settings."""

    def error(self, problem: str | ConfigError, key: str | None = None) -> ConfigError:
        """The `problem` as an error, with file and line if they are known."""
        if self.path is not None:
            return ConfigFileError.at(self.path, self.keys.get(key or "", self.line), problem)
        return problem if isinstance(problem, ConfigError) else ConfigError(problem)


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """Initial weights, penalties and constraints."""

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
    """One layer: its type and arguments, its name, and its inputs."""

    call: Call
    number: int
    """Counted from 1."""
    name: str | None = None
    sources: tuple[str, ...] = (PREVIOUS,)
    weights: WeightSettings = WeightSettings()
    location: TomlLocation = field(default=TomlLocation(), compare=False)

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        source = f" from {', '.join(self.sources)}" if self.sources != (PREVIOUS,) else ""
        weights = f" {self.weights}" if str(self.weights) else ""
        return f"{name}{self.call}{source}{weights}"

    @property
    def label(self) -> str:
        """For messages: `layer 3 'Linear'`."""
        return f"layer {self.number} {self.name or self.call.name!r}"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A model as a list of layers. The same model has the same text, wherever it was written."""

    layers: tuple[Layer, ...]
    name: str = "network"
    input: tuple[int, ...] | None = None
    """The shape of a sample, if declared; the data must match."""
    weights: WeightSettings = WeightSettings()
    """For layers that do not set their own."""
    location: TomlLocation = field(default=TomlLocation(), compare=False)

    @classmethod
    def from_toml(cls, path: str | Path) -> Declared:
        """The model of a run file."""
        from syncline.models.declared.read import read_model

        return read_model(Path(path))

    def build(
        self, input_shape: Sequence[int] | None = None, classes: int | None = None, vocabulary: int | None = None
    ) -> nn.Module:
        """The module, for samples of `input_shape` (without the batch dimension).

        The parameters are drawn from torch's global generator, layer by layer, as torch's own layers do.
        """
        shape = input_shape if input_shape is not None else self.input
        if shape is None:
            raise ConfigError("The shape of a sample is unknown. Pass input_shape, for example (1, 28, 28).")
        # Imported here, because only building needs torch.
        sizes = importlib.import_module("syncline.models.declared.sizes").Sizes(
            input_shape=tuple(shape), classes=classes, vocabulary=vocabulary
        )
        made: nn.Module = importlib.import_module("syncline.models.declared.build").build(self, sizes)
        return made

    def __str__(self) -> str:
        weights = f" {self.weights}" if str(self.weights) else ""
        return f"{self.name}[{'; '.join(map(str, self.layers))}]{weights}"


def declared(layers: Iterable[str | Mapping[str, Any]], **settings: Any) -> Declared:
    """A model as a list of layers: strings such as 'conv2d(20, 5)', or tables such as {"layer": "relu", "name": "a"}.

    Settings are those of the table [model] in a run file: name, input, init, bias_init, regularizer, constraint.

    >>> print(declared(["linear(8)", "relu", {"layer": "add", "from": ["input", "previous"]}]))
    network[linear(8); relu; add from input, previous]
    """
    return of_table({"layers": list(layers), **settings}, TomlLocation(), {})


def is_declaration(model: object) -> bool:
    """Whether this is a table with a list of layers. Models by name may have an integer option `layers`."""
    return isinstance(model, Mapping) and "layers" in model and not isinstance(model["layers"], int)


def of_table(table: Mapping[str, Any], location: TomlLocation, locations: Mapping[int, TomlLocation]) -> Declared:
    """From the table [model] of a run file; `locations` says where each layer is written, counted from 0."""
    for key in table:
        if key not in _OF_MODEL:
            raise location.error(UnknownName.option("[model]", key, _OF_MODEL, kind="setting"), key)
    layers = table.get("layers")
    if not isinstance(layers, list) or not layers:
        raise location.error('layers is empty. Add at least one: layers = ["flatten", "linear(10)"].', "layers")
    shape = table.get("input")
    if shape is not None and not _is_shape(shape):
        raise location.error(f"input is {shape!r}, but must be the shape of a sample, such as [1, 28, 28].", "input")
    name = table.get("name", "network")
    if not isinstance(name, str) or not name:
        raise location.error(f"name is {name!r}, but must be a string.", "name")
    made: list[Layer] = []
    for k, written in enumerate(layers):
        made.append(_layer(written, k + 1, locations.get(k, TomlLocation(location.path, location.line)), made))
    return Declared(
        layers=tuple(made),
        name=name,
        input=tuple(shape) if shape is not None else None,
        weights=_weights(table, location),
        location=location,
    )


def _layer(written: object, number: int, location: TomlLocation, before: Sequence[Layer]) -> Layer:
    table = {"layer": written} if isinstance(written, str) else written
    if not isinstance(table, Mapping) or not isinstance(table.get("layer"), str):
        raise location.error(f'Layer {number} has no type. Set, for example, layer = "Linear".')
    try:
        call = Call.parse(table["layer"])
    except ConfigError as error:
        raise location.error(error, "layer") from error
    # PReLU has its own option init, which is a number.
    own = {k for k in _OF_LAYER if not (k == "init" and isinstance(table.get(k), (int, float)))}
    options = {k: frozen(v) for k, v in table.items() if k not in own}
    twice = sorted(set(options) & set(call.options))
    if twice:
        raise location.error(f"{twice[0]} is given twice for layer {number} {call.name!r}.", twice[0])
    name = table.get("name")
    taken = [layer.name for layer in before if layer.name]
    if name is not None:
        _check_name(name, taken, location)
    return Layer(
        call=call.with_options(**options),
        number=number,
        name=name,
        sources=_sources(table.get("from", PREVIOUS), taken, location),
        weights=_weights({k: v for k, v in table.items() if k in own}, location),
        location=location,
    )


def _check_name(name: object, taken: Sequence[str], location: TomlLocation) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise location.error(
            f"name is {name!r}, but must be an identifier (letters, digits and _), such as 'first'.", "name"
        )
    if name in (PREVIOUS, INPUT):
        raise location.error(f"name is {name!r}, which is reserved. Choose another name.", "name")
    if name in taken:
        raise location.error(f"name is {name!r}, but another layer has this name. Choose another name.", "name")


def _sources(written: object, names: Sequence[str], location: TomlLocation) -> tuple[str, ...]:
    sources = [written] if isinstance(written, str) else written
    if not isinstance(sources, (list, tuple)) or not sources or not all(isinstance(s, str) for s in sources):
        raise location.error(f"from is {written!r}, but must be the name of a layer, or a list of names.", "from")
    for source in sources:
        if source not in (PREVIOUS, INPUT, *names):
            raise location.error(UnknownName.among("earlier layer named", source, [*names, PREVIOUS, INPUT]), "from")
    return tuple(sources)


def _weights(table: Mapping[str, Any], location: TomlLocation) -> WeightSettings:
    found: dict[str, Any] = {}
    for key in ("init", "bias_init", "regularizer", "constraint"):
        if key not in table:
            continue
        several = key in ("regularizer", "constraint")
        values = table[key] if several and isinstance(table[key], list) else [table[key]]
        try:
            calls = tuple(Call.of(value, what=key) for value in values)
        except ConfigError as error:
            raise location.error(error, key) from error
        found[key] = calls if several else calls[0]
    return WeightSettings(**found)


def _is_shape(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value
    )
