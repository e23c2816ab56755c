"""`Network`: the module that a declared model becomes, and the penalties on a model's weights.

Here: letting values flow from layer to layer, by name where branches part and join. Not here: making the layers
(`build.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline.declare.declared import INPUT, PREVIOUS
from syncline.declare.weights import PenaltyTerm

__all__ = ["Network", "Step", "applied", "first_of", "penalty_of", "set_penalties"]


@dataclass(frozen=True)
class Step:
    """One layer's turn: its name among the modules, and the names of the values that it takes."""

    name: str
    sources: tuple[str, ...]


class Network(nn.Module):
    """Layers, each of which takes the outputs of layers before it."""

    def __init__(self, layers: Sequence[nn.Module], steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        for layer, step in zip(layers, steps, strict=True):
            self.add_module(step.name, layer)
        wanted = {source for step in steps for source in step.sources if source != PREVIOUS}
        self._kept = frozenset(wanted)

    def forward(self, input: Tensor) -> Any:  # the name is torch's
        """The output of the last layer."""
        values: dict[str, Any] = {PREVIOUS: input, INPUT: input}
        for step in self.steps:
            layer = self._modules[step.name]
            assert layer is not None
            output = first_of(applied(layer, [values[source] for source in step.sources]))
            values[PREVIOUS] = output
            if step.name in self._kept:
                values[step.name] = output
        return values[PREVIOUS]


def applied(layer: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """What a layer makes of its inputs. Attention to one input is attention to itself."""
    if isinstance(layer, nn.MultiheadAttention):
        query, key, value = inputs if len(inputs) == 3 else (inputs[0], inputs[-1], inputs[-1])
        return layer(query, key, value, need_weights=False)
    return layer(*inputs)


def first_of(output: Any) -> Any:
    """Of several outputs, as recurrent layers have them, the first counts."""
    return output[0] if isinstance(output, tuple) else output


def set_penalties(model: nn.Module, terms: Sequence[PenaltyTerm]) -> None:
    """Let these be added to the model's loss in training."""
    # Paths and not tensors: a copy of the model has weights of its own.
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
