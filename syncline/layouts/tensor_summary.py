"""What dividing a model means for a run, in numbers and sentences for `syncline explain`.

Here: `describe`, and `exchanged_bytes`, for which the model is called once with a batch of one, on any device, torch's
meta device included. Not here: the decision (`tensor_split.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from syncline.errors import plural
from syncline.layouts.tensor_split import DividedLayer, Split
from syncline.models.declared.network import first_of
from syncline.models.summary.units import format_bytes

_MOST_NAMES = 6


def describe(split: Split, bytes_per_sample: int | None = None) -> list[str]:
    """Which layers are divided, what each worker holds, and what is exchanged for each sample, if that is known."""
    numbers = [sum(piece.high - piece.low for piece in split.pieces(rank)) for rank in range(split.size)]
    divided, layers = split.divided, [layer.name or "the model" for layer in split.layers]
    whole = sum(split.count(name) for name in split.shapes if name not in divided)
    lines = [
        f"{split.size} workers compute {plural(len(layers), 'layer')} together, each an equal part of the rows: "
        f"{_shortened(layers)}. All compute the others, with {format_bytes(whole * split.item_bytes)} of parameters.",
        f"Parameters exist once, in memory that all workers share. A worker holds the gradients and the optimizer "
        f"state of up to {format_bytes(max(numbers) * split.item_bytes)} of "
        f"{format_bytes(sum(numbers) * split.item_bytes)}, and updates these.",
    ]
    if bytes_per_sample is not None:
        lines.append(
            f"In each step the workers exchange {format_bytes(bytes_per_sample)} of activations and their gradients "
            "for each sample."
        )
    return lines


def exchanged_bytes(model: nn.Module, split: Split, inputs: Sequence[Any]) -> int:
    """What the workers put together for one sample in a training step; `inputs` are those of the model, for one sample.

    The gradient of the first layer's input counts, too, although it is not needed if that is the sample itself.
    """
    total = 0

    def count(layer: DividedLayer, module: Any, given: Sequence[Any], output: Any) -> None:
        nonlocal total
        made = first_of(output)
        if layer.kind == "attention":
            # Three projections and one of what the heads have seen, with the gradients of their two inputs. If the
            # heads are divided, what they have seen, and the gradients of the three projections.
            by_heads = module.num_heads % split.size == 0 and not module.dropout
            total += (10 if by_heads else 6) * made.numel() * made.element_size()
        elif layer.kind != "embedding":  # which all workers read where it is
            total += (made.numel() + given[0].numel()) * made.element_size()

    hooks = [
        model.get_submodule(layer.name).register_forward_hook(
            lambda module, given, named, output, layer=layer: count(layer, module, (*given, *named.values()), output),
            with_kwargs=True,
        )
        for layer in split.layers
    ]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, is_training in modes:
            module.training = is_training
    return total


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"
