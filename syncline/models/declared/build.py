"""Building a module from a declared model.

Here: two passes over the layers. The first, on torch's meta device, needs no weights: it computes the shape of every
output, fills in the sizes that the user omitted, and finds all errors before anything costs time or random numbers. The
second creates the layers in order. So a declared model has the same initial weights as the same layers written in
Python. Not here: the forward pass (`network.py`), which sizes are determined (`sizes.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import ConfigError
from syncline.models.catalog import layers as layer_names
from syncline.models.catalog.lookup import find
from syncline.models.declared.declaration import INPUT, PREVIOUS, Declared, Layer, WeightSettings
from syncline.models.declared.network import DeclaredNetwork, Node, applied, first_of, set_penalties
from syncline.models.declared.sizes import Sizes, bound
from syncline.models.declared.weights import PenaltyTerm, constrain, initialize, penalty_terms

_SAMPLES = 2
"""The batch size of the first pass."""


@dataclass(frozen=True)
class Resolved:
    """A layer with all its arguments and shapes, but no weights."""

    layer: Layer
    kind: type[nn.Module]
    arguments: inspect.BoundArguments
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    """Without the batch."""
    is_plain: bool
    """Whether it has one input and one output, as in nn.Sequential."""

    @property
    def name(self) -> str:
        """Its module name: the given one, or its index, as in nn.Sequential."""
        return self.layer.name or str(self.layer.number - 1)

    def make(self) -> nn.Module:
        """The module, with weights from torch's generator."""
        return self.kind(*self.arguments.args, **self.arguments.kwargs)


def build(model: Declared, sizes: Sizes) -> nn.Module:
    """The module, for data of these sizes: an nn.Sequential if there are no branches."""
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
        made = DeclaredNetwork(list(modules.values()), [Node(f.name, f.layer.sources) for f in resolved])
    set_penalties(made, terms)
    return made


def _weighted(module: nn.Module, found: Resolved, common: WeightSettings) -> list[PenaltyTerm]:
    """Initialize and constrain a layer; returns its penalties."""
    own = found.layer.weights
    key = "init"
    try:
        initialize(module, own, common)
        key = "regularizer"
        terms = penalty_terms(found.name, module, own, common)
        key = "constraint"
        constrain(module, own, common)
    except ConfigError as error:
        raise found.layer.location.error(f"{_capital(found.layer.label)}: {error}", key) from error
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
            raise layer.location.error(f"{_capital(layer.label)}: {error}", _key_in(layer, str(error))) from error
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
        raise layer.location.error(
            f"name is {layer.name!r}, which is an attribute of every torch module. Choose another name.", "name"
        )
    try:
        kind: type[nn.Module] = find("layer", layer.call.name, layer_names.usable())
    except ConfigError as error:
        raise layer.location.error(f"{error} List them with: syncline list layers.", "layer") from error
    return kind


def _output(layer: Layer, kind: type[nn.Module], arguments: inspect.BoundArguments, inputs: Sequence[Tensor]) -> Any:
    """The layer's output on the meta device."""
    shapes = " and ".join(str(tuple(value.shape[1:])) for value in inputs)
    try:
        with torch.device("meta"):
            module = kind(*arguments.args, **arguments.kwargs).eval()
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise layer.location.error(f"{_capital(layer.label)} cannot be created: {_one_line(error)}") from error
    try:
        with torch.no_grad():
            whole = applied(module, inputs)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise layer.location.error(f"{_capital(layer.label)} got shape {shapes}: {_one_line(error)}") from error
    output = first_of(whole)
    if not isinstance(output, Tensor) or output.dim() < 1 or len(output) != _SAMPLES:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise layer.location.error(
            f"{_capital(layer.label)} returns {got} for {_SAMPLES} samples of shape {shapes}. It must keep "
            "dimension 0, the batch."
        )
    return whole


def _check_input(model: Declared, sizes: Sizes) -> None:
    if model.input is not None and model.input != sizes.input_shape:
        raise model.location.error(
            f"input is {list(model.input)}, but the samples of this data have shape {list(sizes.input_shape)}. "
            "Remove input, or choose data that matches.",
            "input",
        )


def _key_in(layer: Layer, message: str) -> str | None:
    """The setting that a message is about, if it is written on a line of its own."""
    return next((key for key in layer.call.options if repr(key) in message), None)


def _one_line(error: Exception) -> str:
    """torch's message in one line."""
    return " ".join(str(error).split()).rstrip(".") + "."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
