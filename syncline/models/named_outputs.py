"""Outputs of a model by name: what it returns, probabilities derived from that, and the output of any layer.

Here: `NamedOutputs`, a module around a model. The names of layers are those of torch (`named_modules`), which `syncline
show` lists. Not here: what the outputs mean (`answers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import ConfigError, UnknownName
from syncline.models.answers import LOGITS, OUTPUT, PROBABILITIES, Answers, main_name

__all__ = ["NamedOutputs", "check_names", "layer_names"]


def layer_names(model: nn.Module) -> list[str]:
    """The names of all layers, in the order of the model."""
    return [name for name, _ in model.named_modules() if name]


def check_names(model: nn.Module, answers: Answers, names: Sequence[str]) -> None:
    """`UnknownName` for the first that is neither a layer nor an output of a model with one output tensor."""
    known = [main_name(answers), *([PROBABILITIES] if main_name(answers) == LOGITS else []), *layer_names(model)]
    for name in names:
        if name not in known:
            raise UnknownName.among("output or layer", name, known)


class NamedOutputs(nn.Module):
    """A model that returns a dict of tensors by name.

    `names` chooses them and their order; without it, all that the model returns, and probabilities. A layer that is
    called several times gives its last output.
    """

    def __init__(self, model: nn.Module, answers: Answers, names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.model, self._answers = model, answers
        self._names = tuple(names) if names is not None else None
        layers = set(layer_names(model))
        self._layers = tuple(n for n in self._names or () if n in layers and n not in (LOGITS, PROBABILITIES, OUTPUT))

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The chosen outputs; `UnknownName` lists what there is."""
        caught: dict[str, Tensor] = {}
        hooks = [self.model.get_submodule(name).register_forward_hook(_catch(caught, name)) for name in self._layers]
        try:
            found = self._with_probabilities(_by_name(self.model(*inputs), main_name(self._answers)))
        finally:
            for hook in hooks:
                hook.remove()
        if self._names is None:
            return found
        return {name: self._one(name, found, caught) for name in self._names}

    def _one(self, name: str, found: Mapping[str, Tensor], caught: Mapping[str, Tensor]) -> Tensor:
        if name in found:
            return found[name]
        if name in caught:
            return caught[name]
        if name in self._layers:
            raise ConfigError(
                f"The layer {name!r} is not called in a forward pass, so it has no output. Choose the layer that "
                "contains it, or one inside of it.",
                code="layer-not-called", layer=name,
            )  # fmt: skip
        raise UnknownName.among("output or layer", name, [*found, *layer_names(self.model)])

    def _with_probabilities(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = found.get(LOGITS)
        if logits is None or PROBABILITIES in found or not logits.is_floating_point():
            return found
        if self._answers == "classes" and logits.dim() >= 2:
            return {PROBABILITIES: torch.softmax(logits, dim=1), **found}
        if self._answers == "binary logits":
            return {PROBABILITIES: torch.sigmoid(logits), **found}
        return found


def _catch(caught: dict[str, Tensor], name: str) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        while isinstance(output, (tuple, list)) and output:
            output = output[0]  # of a recurrent layer or attention: the sequence
        if isinstance(output, Tensor):
            caught[name] = output

    return hook


def _by_name(output: Any, main: str) -> dict[str, Tensor]:
    """What a model returned, by name."""
    if isinstance(output, Tensor):
        return {main: output}
    if isinstance(output, Mapping):  # as the models of transformers return
        found = {str(name): value for name, value in output.items() if isinstance(value, Tensor)}
    elif isinstance(output, (tuple, list)):
        tensors = [value for value in output if isinstance(value, Tensor)]
        found = {main if k == 0 else f"{OUTPUT}{k}": value for k, value in enumerate(tensors)}
    else:
        found = {}
    if not found:
        raise ConfigError(
            f"The model returns a {type(output).__name__}, which holds no tensors. Return a tensor, a tuple or a dict "
            "of tensors.",
            code="output-type", type=type(output).__name__,
        )  # fmt: skip
    return found
