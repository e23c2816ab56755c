"""`DeclaredNetwork`: the module of a declared model with branches, and the penalties on a model's weights.

Here: the forward pass from layer to layer, by name where there are branches. Not here: building layers (`build.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline.models.declared.declaration import INPUT, PREVIOUS
from syncline.models.declared.weights import PenaltyTerm


@dataclass(frozen=True)
class Node:
    """One layer in the graph: its module name, and the names of its inputs."""

    name: str
    sources: tuple[str, ...]


class DeclaredNetwork(nn.Module):
    """Layers, each of which takes the outputs of layers before it."""

    def __init__(self, layers: Sequence[nn.Module], nodes: Sequence[Node]) -> None:
        super().__init__()
        self.nodes = tuple(nodes)
        for layer, node in zip(layers, nodes, strict=True):
            self.add_module(node.name, layer)
        wanted = {source for node in nodes for source in node.sources if source != PREVIOUS}
        self._kept = frozenset(wanted)

    def forward(self, input: Tensor) -> Any:  # the name is torch's
        """The output of the last layer."""
        values: dict[str, Any] = {PREVIOUS: input, INPUT: input}
        for node in self.nodes:
            layer = self._modules[node.name]
            assert layer is not None
            output = first_of(applied(layer, [values[source] for source in node.sources]))
            values[PREVIOUS] = output
            if node.name in self._kept:
                values[node.name] = output
        return values[PREVIOUS]


def applied(layer: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """The output of a layer. Attention with one input is self-attention."""
    if isinstance(layer, nn.MultiheadAttention):
        query, key, value = inputs if len(inputs) == 3 else (inputs[0], inputs[-1], inputs[-1])
        return layer(query, key, value, need_weights=False)
    return layer(*inputs)


def first_of(output: Any) -> Any:
    """The first of several outputs, as of recurrent layers."""
    return output[0] if isinstance(output, tuple) else output


def set_penalties(model: nn.Module, terms: Sequence[PenaltyTerm]) -> None:
    """Add these penalties to the model's loss in training."""
    # Paths, not tensors, because a copy of the model has its own weights.
    vars(model)["penalties"] = tuple(terms)


def penalty_of(model: nn.Module) -> Tensor | None:
    """The sum of the penalties on a model's weights; None if it has none."""
    terms: Sequence[PenaltyTerm] = vars(model).get("penalties", ())
    total: Tensor | None = None
    for path, penalty, call in terms:
        holder, _, name = path.rpartition(".")
        weight: Tensor = getattr(model.get_submodule(holder), name)
        with torch.autocast(weight.device.type, enabled=False):
            term = penalty(weight, *call.arguments, **call.options)
        total = term if total is None else total + term
    return total
