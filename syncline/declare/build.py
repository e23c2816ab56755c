"""From a declared model to a module.

Here: two passes over the layers. The first, on torch's meta device, has no weights: it finds the shape of every value
and with it the sizes that a user need not write, and finds every mistake, before anything costs time or random
numbers. The second makes the layers, in order. So a declared model has the same initial weights as the same layers
written in Python. Not here: letting values flow (`network.py`), which sizes follow (`sizes.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline.catalogue import layers as layer_names
from syncline.catalogue.lookup import find
from syncline.declare.declared import INPUT, PREVIOUS, Declared, Layer, Weights
from syncline.declare.network import Network, Step, applied, first_of, set_penalties
from syncline.declare.sizes import Sizes, bound
from syncline.declare.weights import PenaltyTerm, constrain, initialize, penalty_terms
from syncline.errors import ConfigError

__all__ = ["Resolved", "build", "resolve"]

_SAMPLES = 2
"""How many samples the first pass pretends to have."""


@dataclass(frozen=True)
class Resolved:
    """A layer of which everything is known but its weights."""

    layer: Layer
    kind: type[nn.Module]
    arguments: inspect.BoundArguments
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    """Without the batch."""
    is_plain: bool
    """Whether it takes one value and gives one, as all layers of an nn.Sequential do."""

    @property
    def name(self) -> str:
        """Its name among the modules: the given one, or its number from 0, as in nn.Sequential."""
        return self.layer.name or str(self.layer.number - 1)

    def make(self) -> nn.Module:
        """The module, with weights from torch's generator."""
        return self.kind(*self.arguments.args, **self.arguments.kwargs)


def build(model: Declared, sizes: Sizes) -> nn.Module:
    """The module, for data of these sizes: an nn.Sequential if every layer takes what the one before gives."""
    resolved = resolve(model, sizes)
    modules: dict[str, nn.Module] = {}
    terms: list[PenaltyTerm] = []
    for found in resolved:
        modules[found.name] = module = found.make()
        terms += _weighted(module, found, model.weights)
    made: nn.Module
    if all(found.is_plain for found in resolved):
        made = nn.Sequential()
        for name, module in modules.items():
            made.add_module(name, module)
    else:
        made = Network(list(modules.values()), [Step(f.name, f.layer.sources) for f in resolved])
    set_penalties(made, terms)
    return made


def _weighted(module: nn.Module, found: Resolved, common: Weights) -> list[PenaltyTerm]:
    """Give a layer its initial weights and constraints; its penalties are returned."""
    own = found.layer.weights
    key = "init"
    try:
        initialize(module, own, common)
        key = "regularizer"
        terms = penalty_terms(found.name, module, own, common)
        key = "constraint"
        constrain(module, own, common)
    except ConfigError as error:
        raise found.layer.place.error(f"{_capital(found.layer.label)}: {error}", key) from error
    return terms


def resolve(model: Declared, sizes: Sizes) -> list[Resolved]:
    """Every layer with its arguments and the shape of its output."""
    _check_input(model, sizes)
    kinds = [_kind(layer) for layer in model.layers]
    dtype = torch.int64 if sizes.are_tokens or sizes.vocabulary is not None else torch.float32
    sample = torch.zeros(_SAMPLES, *sizes.input_shape, dtype=dtype, device="meta")
    values: dict[str, Tensor] = {INPUT: sample, PREVIOUS: sample}
    found: list[Resolved] = []
    for layer, kind in zip(model.layers, kinds, strict=True):
        inputs = [values[source] for source in layer.sources]
        try:
            arguments = bound(kind, layer.call, inputs, sizes)
        except ConfigError as error:
            raise layer.place.error(f"{_capital(layer.label)}: {error}", _key_in(layer, str(error))) from error
        whole = _output(layer, kind, arguments, inputs)
        output = first_of(whole)
        values[PREVIOUS] = output
        if layer.name:
            values[layer.name] = output
        shapes = tuple(tuple(value.shape[1:]) for value in inputs)
        is_plain = output is whole and layer.sources == (PREVIOUS,) and kind is not nn.MultiheadAttention
        found.append(Resolved(layer, kind, arguments, shapes, tuple(output.shape[1:]), is_plain))
    return found


def _kind(layer: Layer) -> type[nn.Module]:
    if layer.name is not None and hasattr(nn.Module(), layer.name):
        raise layer.place.error(f"name is {layer.name!r}, which every torch module has. Choose another one.", "name")
    try:
        kind: type[nn.Module] = find("layer", layer.call.name, layer_names.usable())
    except ConfigError as error:
        raise layer.place.error(f"{error} All of them: syncline list layers.", "layer") from error
    return kind


def _output(layer: Layer, kind: type[nn.Module], arguments: inspect.BoundArguments, inputs: Sequence[Tensor]) -> Any:
    """What the layer gives for samples without values."""
    shapes = " and ".join(str(tuple(value.shape[1:])) for value in inputs)
    try:
        with torch.device("meta"):
            module = kind(*arguments.args, **arguments.kwargs).eval()
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise layer.place.error(f"{_capital(layer.label)} cannot be made: {_told(error)}") from error
    try:
        with torch.no_grad():
            whole = applied(module, inputs)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise layer.place.error(f"{_capital(layer.label)} got shape {shapes}: {_told(error)}") from error
    output = first_of(whole)
    if not isinstance(output, Tensor) or output.dim() < 1 or len(output) != _SAMPLES:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise layer.place.error(
            f"{_capital(layer.label)} makes {got} of {_SAMPLES} samples of shape {shapes}. Dimension 0, the samples, "
            "has to stay as it is."
        )
    return whole


def _check_input(model: Declared, sizes: Sizes) -> None:
    if model.input is not None and model.input != sizes.input_shape:
        raise model.place.error(
            f"input is {list(model.input)}, but the samples of this data have shape {list(sizes.input_shape)}. "
            "Leave input out, or choose data that fits.",
            "input",
        )


def _key_in(layer: Layer, message: str) -> str | None:
    """The setting that a message is about, if it is written on a line of its own."""
    return next((key for key in layer.call.options if repr(key) in message), None)


def _told(error: Exception) -> str:
    """torch's own words, in one line."""
    return " ".join(str(error).split()).rstrip(".") + "."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
